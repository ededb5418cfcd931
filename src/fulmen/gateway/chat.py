"""OpenAI's chat completions: the wire format, read and written. No state, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.render import Answer, Message
from fulmen.schema.records import JSON

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, checked. None: not given."""

    body: Mapping[str, JSON]
    """As it came; unknown fields are kept."""
    model: str
    messages: list[Message]
    tools: list[dict[str, JSON]] = field(default_factory=list)
    n: int = 1
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    template_options: Mapping[str, JSON] = field(default_factory=dict)


def read_request(body: JSON) -> ChatRequest:
    """Check a decoded body.

    Raises:
        RequestRefused: what is wrong, naming the parameter.
    """
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    choice = body.get("tool_choice")
    tools = _tools(body)
    if choice not in (None, "auto", "none"):
        raise RequestRefused(
            "tool_choice can be 'auto' or 'none'; forcing a call is not supported yet",
            param="tool_choice",
        )
    if body.get("response_format") not in (None, {"type": "text"}):
        raise RequestRefused(
            "response_format can only be text; structured output is not supported yet",
            param="response_format",
        )
    maximum = _number(body, "max_completion_tokens", int, low=1)
    if maximum is None:
        maximum = _number(body, "max_tokens", int, low=1)
    return ChatRequest(
        body=body,
        model=_string(body, "model"),
        messages=_messages(body),
        tools=[] if choice == "none" else tools,
        n=_number(body, "n", int, low=1, high=128) or 1,
        stop=_stop(body),
        max_tokens=maximum,
        temperature=_number(body, "temperature", float, low=0, high=2),
        top_p=_number(body, "top_p", float, low=1e-6, high=1),
        seed=_number(body, "seed", int),
        logprobs=_flag(body, "logprobs"),
        top_logprobs=_number(body, "top_logprobs", int, low=0, high=20) or 0,
        stream=_flag(body, "stream"),
        include_usage=_flag(_object(body, "stream_options"), "include_usage"),
        template_options=_object(body, "chat_template_kwargs"),
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
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise RequestRefused(
                f"{where}.tool_calls must be a list of calls with a function's name and arguments",
                param=f"{where}.tool_calls",
            )
    return messages


def _check_content(content: JSON, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestRefused(f"{where} must be text or a list of parts", param=where)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise RequestRefused(f"{where}: parts of type {kind!r} are not supported", param=where)


def _is_call(call: JSON) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), str)
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
        raise RequestRefused("stop must be a string or a list of strings", param="stop")
    return tuple(stops)


def _string(body: Mapping[str, JSON], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise RequestRefused(f"{name} must be a string", param=name)
    return value


def _flag(body: Mapping[str, JSON], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestRefused(f"{name} must be true or false", param=name)
    return bool(value)


def _object(body: Mapping[str, JSON], name: str) -> Mapping[str, JSON]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestRefused(f"{name} must be an object", param=name)
    return value or {}


def _number(
    body: Mapping[str, JSON],
    name: str,
    kind: Callable[[Any], Any],
    *,
    low: float | None = None,
    high: float | None = None,
) -> Any:  # noqa: ANN401 - int or float, as `kind` says
    value = body.get(name)
    if value is None:
        return None
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits or (low is not None and value < low) or (high is not None and value > high):
        bounds = f" from {low or 0:g}" + (f" to {high:g}" if high is not None else " on")
        word = "an integer" if kind is int else "a number"
        raise RequestRefused(
            f"{name} must be {word}{bounds if low is not None else ''}", param=name
        )
    return kind(value)


def answer_message(answer: Answer, call_ids: Sequence[str]) -> dict[str, JSON]:
    """The assistant message of an answer; `call_ids` name its tool calls."""
    message: dict[str, JSON] = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call_id, call in zip(call_ids, answer.tool_calls, strict=True)
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
