"""OpenAI's chat completions, read: a body in, a `CallRequest` out. No state, no I/O."""

from collections.abc import Mapping

from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.messages import Message
from fulmen.gateway.request import (
    CallRequest,
    flag_field,
    integer_field,
    number_field,
    object_field,
    text_field,
)
from fulmen.schema.records import JSON

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MOST_CHOICES = 128
_MOST_TOP_LOGPROBS = 20
"""Both are OpenAI's own limits."""


def read_chat(body: JSON) -> CallRequest:
    """Check a decoded body.

    Raises:
        RequestRefused: what is wrong, naming the parameter.
    """
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    _refuse_unsupported(body)
    tools = _tools(body)
    maximum = integer_field(body, "max_completion_tokens", low=1)
    if maximum is None:
        maximum = integer_field(body, "max_tokens", low=1)
    return CallRequest(
        protocol="chat",
        body=body,
        model=text_field(body, "model"),
        messages=_messages(body),
        tools=[] if body.get("tool_choice") == "none" else tools,
        n=integer_field(body, "n", low=1, high=_MOST_CHOICES) or 1,
        stop=_stop(body),
        max_tokens=maximum,
        temperature=number_field(body, "temperature", low=0, high=2),
        top_p=number_field(body, "top_p", low=0, high=1),
        seed=integer_field(body, "seed"),
        logprobs=flag_field(body, "logprobs"),
        top_logprobs=_top_logprobs(body),
        stream=flag_field(body, "stream"),
        include_usage=flag_field(object_field(body, "stream_options"), "include_usage"),
        template_options=object_field(body, "chat_template_kwargs"),
    )


def _refuse_unsupported(body: Mapping[str, JSON]) -> None:
    """What would change the answer's form must not be passed over in silence."""
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise RequestRefused(
            "tool_choice can be 'auto' or 'none'; forcing a call is not supported yet",
            param="tool_choice",
        )
    if body.get("response_format") not in (None, {"type": "text"}):
        raise RequestRefused(
            "response_format can only be text; structured output is not supported yet",
            param="response_format",
        )


def _messages(body: Mapping[str, JSON]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages must be a list with at least one message", param="messages")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise RequestRefused(f"{where}.role must be one of {', '.join(_ROLES)}", param=where)
        _check_content(message.get("content"), f"{where}.content")
        _check_calls(message.get("tool_calls"), f"{where}.tool_calls")
        for name in ("name", "tool_call_id", "reasoning_content"):
            if not isinstance(message.get(name) or "", str):
                raise RequestRefused(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return messages


def _check_content(content: JSON, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestRefused(f"{where} must be text or a list of parts", param=where)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise RequestRefused(
                f"{where}: parts of type {kind!r} are not supported, only text", param=where
            )
        if not isinstance(part.get(kind), str):
            raise RequestRefused(f"{where}: a part of type {kind!r} has no text", param=where)


def _check_calls(calls: JSON, where: str) -> None:
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise RequestRefused(
            f"{where} must be a list of calls with a function's name and arguments", param=where
        )


def _is_call(call: JSON) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), str)
        and isinstance(call.get("id") or "", str)
    )


def _tools(body: Mapping[str, JSON]) -> list[dict[str, JSON]]:
    tools = body.get("tools")
    if tools is None:
        return []
    for place, tool in enumerate(tools if isinstance(tools, list) else [None]):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(
                f"tools[{place}] must be a function with a name", param=f"tools[{place}]"
            )
    return tools


def _stop(body: Mapping[str, JSON]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestRefused("stop must be a string or a list of strings, none empty", param="stop")
    return tuple(stops)


def _top_logprobs(body: Mapping[str, JSON]) -> int:
    wanted = integer_field(body, "top_logprobs", low=0, high=_MOST_TOP_LOGPROBS)
    if wanted and not body.get("logprobs"):
        raise RequestRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
    return wanted or 0
