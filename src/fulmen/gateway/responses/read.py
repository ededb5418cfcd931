"""OpenAI's responses: a body, read."""

from collections.abc import Sequence

from fulmen.gateway import fields
from fulmen.gateway.attempt import Attempt
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.fields import Body
from fulmen.gateway.form import ForcedCall, JsonOutput
from fulmen.gateway.render import Message
from fulmen.gateway.request import ModelRequest
from fulmen.gateway.responses.items import to_messages
from fulmen.gateway.tools import (
    callable_names,
    check_function,
    check_names,
    forced_call,
    function_tool,
    tool_name,
)
from fulmen.schema.records import JSON

LOGPROBS = "message.output_text.logprobs"


def read_request(body: JSON, attempt: Attempt) -> ModelRequest:
    """Check a decoded body; what `previous_response_id` stands for comes from the attempt.

    Raises:
        RequestRefused: what is wrong, naming the parameter.
    """
    body = fields.body_object(body)
    fields.refuse(body, "background", "conversation", "prompt")
    is_stored(body)  # checked now: it is needed when the answer is there
    tools, parallel = _tools(body), body.get("parallel_tool_calls")
    top = fields.integer(body, "top_logprobs", low=0, high=20)
    return ModelRequest(
        protocol="responses",
        body=body,
        model=fields.required_string(body, "model"),
        messages=[*_instructions(body), *_earlier(body, attempt), *_input(body, attempt)],
        tools=tools,
        callable=callable_names(body.get("tool_choice")),
        output=_forced(body, tools) or _json_output(body),
        parallel_calls=True if parallel is None else fields.flag(body, "parallel_tool_calls"),
        max_tokens=fields.integer(body, "max_output_tokens", low=1),
        temperature=fields.number(body, "temperature", low=0, high=2),
        top_p=fields.number(body, "top_p", low=1e-6, high=1),
        logprobs=LOGPROBS in fields.listing(body, "include"),
        top_logprobs=top or 0,
        stream=fields.flag(body, "stream"),
    )


def is_stored(body: Body) -> bool:
    """Whether later requests may refer to the answer."""
    return True if body.get("store") is None else fields.flag(body, "store")


def _instructions(body: Body) -> list[Message]:
    """They hold for this request alone, not for those that continue it."""
    text = fields.string(body, "instructions")
    return [{"role": "system", "content": text}] if text else []


def _earlier(body: Body, attempt: Attempt) -> Sequence[Message]:
    name = fields.string(body, "previous_response_id")
    if name is None:
        return ()
    kept = attempt.responses.get(name)
    if kept is None:
        raise RequestRefused(
            f"Previous response with id {name[:100]!r} not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return kept.messages


def _input(body: Body, attempt: Attempt) -> list[Message]:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not (items or body.get("previous_response_id")):
        raise RequestRefused("input must be text or a list of items", param="input")
    return to_messages(items, attempt.item)


def _tools(body: Body) -> list[dict[str, JSON]]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools")):
        where = f"tools[{place}]"
        if tool.get("type") != "function":
            raise RequestRefused(
                f"{where}: tools of type {tool.get('type')!r} are not supported, only functions",
                param=where,
            )
        check_function(tool, where, "parameters")
        tools.append(function_tool(tool, "parameters"))
    check_names(tools)
    return tools


def _forced(body: Body, tools: Sequence[dict[str, JSON]]) -> ForcedCall | None:
    names = tuple(tool["function"]["name"] for tool in tools)
    match body.get("tool_choice"):
        case None | "auto" | "none":
            return None
        case "required":
            return forced_call(names)
        case {"type": "function", "name": str(name)}:
            return forced_call(names, (name,))
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            chosen = forced_call(names, tuple(tool_name(tool) for tool in allowed))
            return chosen if mode == "required" else None
    raise RequestRefused(
        "tool_choice must be 'auto', 'none', 'required' or name one of the tools",
        param="tool_choice",
    )


def _json_output(body: Body) -> JsonOutput | None:
    match fields.mapping(body, "text").get("format"):
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return JsonOutput({"type": "object"})
        case {"type": "json_schema", "schema": dict(schema)}:
            return JsonOutput(schema)
    raise RequestRefused(
        "text.format must be of type text, json_object or json_schema (with a schema)",
        param="text.format",
    )
