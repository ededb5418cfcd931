"""OpenAI's chat completions: a body, read."""

from collections.abc import Sequence

from fulmen.gateway import fields
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.fields import Body
from fulmen.gateway.form import ForcedCall, JsonOutput
from fulmen.gateway.render import Message
from fulmen.gateway.request import ModelRequest
from fulmen.gateway.tools import (
    callable_names,
    check_function,
    check_names,
    forced_call,
    tool_name,
)
from fulmen.schema.records import JSON

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ANY_OBJECT: dict[str, JSON] = {"type": "object"}


def read_request(body: JSON) -> ModelRequest:
    """Check a decoded body.

    Raises:
        RequestRefused: what is wrong, naming the parameter.
    """
    body = fields.body_object(body)
    fields.refuse(body, "functions", "function_call", "audio", "web_search_options")
    fields.refuse(body, *fields.OTHER_SAMPLING)
    if "audio" in fields.listing(body, "modalities"):
        raise RequestRefused("modalities: audio is not supported", param="modalities")
    tools = _tools(body)
    maximum = fields.integer(body, "max_completion_tokens", low=1)
    if maximum is None:
        maximum = fields.integer(body, "max_tokens", low=1)
    parallel = body.get("parallel_tool_calls")
    return ModelRequest(
        protocol="chat",
        body=body,
        model=fields.required_string(body, "model"),
        messages=_messages(body),
        tools=tools,
        callable=callable_names(body.get("tool_choice")),
        output=_forced(body, tools) or _json_output(body),
        parallel_calls=True if parallel is None else fields.flag(body, "parallel_tool_calls"),
        n=fields.integer(body, "n", low=1, high=128) or 1,
        stop=fields.strings(body, "stop"),
        max_tokens=maximum,
        temperature=fields.number(body, "temperature", low=0, high=2),
        top_p=fields.number(body, "top_p", low=1e-6, high=1),
        seed=fields.integer(body, "seed"),
        logprobs=fields.flag(body, "logprobs"),
        top_logprobs=fields.integer(body, "top_logprobs", low=0, high=20) or 0,
        stream=fields.flag(body, "stream"),
        template_options=fields.mapping(body, "chat_template_kwargs"),
    )


def _messages(body: Body) -> list[Message]:
    messages = fields.listing(body, "messages")
    if not messages:
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


def _tools(body: Body) -> list[dict[str, JSON]]:
    """The functions that may be called."""
    tools = fields.objects(body, "tools")
    for place, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestRefused(f"tools[{place}] must be a function", param=f"tools[{place}]")
        check_function(function, f"tools[{place}]", "parameters")
    check_names(tools)
    return tools


def _forced(body: Body, tools: Sequence[dict[str, JSON]]) -> ForcedCall | None:
    """The tools of which one must be called, if one must."""
    choice = body.get("tool_choice")
    names = tuple(tool["function"]["name"] for tool in tools)
    match choice:
        case None | "auto" | "none":
            return None
        case "required":
            return forced_call(names)
        case {"type": "function", "function": {"name": str(name)}}:
            return forced_call(names, (name,))
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
            chosen = forced_call(names, tuple(tool_name(tool) for tool in allowed))
            return chosen if mode == "required" else None
    raise RequestRefused(
        "tool_choice must be 'auto', 'none', 'required' or name one of the tools",
        param="tool_choice",
    )


def _json_output(body: Body) -> JsonOutput | None:
    match body.get("response_format"):
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonOutput(_ANY_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return JsonOutput(schema)
        case {"type": "json_schema", "json_schema": dict(form)} if form.get("schema") is None:
            return JsonOutput(_ANY_OBJECT)
    raise RequestRefused(
        "response_format must be of type text, json_object or json_schema (with a schema)",
        param="response_format",
    )
