"""Anthropic's messages: a body, read."""

import json
from collections.abc import Iterator, Mapping, Sequence

from fulmen.gateway import fields
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.fields import Body
from fulmen.gateway.form import ForcedCall, JsonOutput
from fulmen.gateway.messages.error import NO_THREADS
from fulmen.gateway.render import Message
from fulmen.gateway.request import ModelRequest
from fulmen.gateway.tools import check_function, check_names, forced_call, function_tool
from fulmen.schema.records import JSON

_FILLER = "[System: Empty message content sanitised to satisfy protocol]"
"""What LiteLLM writes into an assistant's message that has no text, since Anthropic takes none
that is empty. The policy never said it."""


def read_request(body: JSON, *, count: bool = False) -> ModelRequest:
    """Check a decoded body.

    Args:
        body: decoded JSON.
        count: only the prompt's tokens are wanted, so that `max_tokens` may be missing.

    Raises:
        RequestRefused: what is wrong, naming the parameter.
    """
    body = fields.body_object(body)
    fields.refuse(body, "top_k", "container", "mcp_servers", "compaction")
    if body.get("thread"):
        raise RequestRefused(
            "thread is not supported; send the whole conversation", param="thread", code=NO_THREADS
        )
    maximum = fields.integer(body, "max_tokens", low=1)
    if maximum is None and not count:
        raise RequestRefused("max_tokens: Field required", param="max_tokens")
    tools = _tools(body)
    choice = fields.mapping(body, "tool_choice")
    return ModelRequest(
        protocol="messages",
        body=body,
        model=fields.required_string(body, "model"),
        messages=[*_system(body), *_messages(body)],
        tools=tools,
        callable=() if choice.get("type") == "none" else None,
        output=_forced(choice, tools) or _json_output(body),
        parallel_calls=not fields.flag(choice, "disable_parallel_tool_use"),
        stop=fields.strings(body, "stop_sequences"),
        max_tokens=maximum,
        temperature=fields.number(body, "temperature", low=0, high=1),
        top_p=fields.number(body, "top_p", low=1e-6, high=1),
        stream=fields.flag(body, "stream"),
    )


def _system(body: Body) -> list[Message]:
    system = body.get("system")
    text = _text(system, "system") if system is not None else ""
    return [{"role": "system", "content": text}] if text else []


def _messages(body: Body) -> list[Message]:
    given = fields.objects(body, "messages")
    if not given:
        raise RequestRefused("messages: at least one message is required", param="messages")
    messages: list[Message] = []
    for place, message in enumerate(given):
        where = f"messages.{place}"
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise RequestRefused(f"{where}.content must be text or blocks", param=where)
        match message.get("role"):
            case "user":
                messages += _user(blocks, f"{where}.content")
            case "assistant":
                messages.append(_assistant(blocks, f"{where}.content"))
            case "system":
                text = _text(blocks, f"{where}.content")
                messages.append({"role": "system", "content": text})
            case _:
                raise RequestRefused(f"{where}.role must be user or assistant", param=where)
    if messages[-1]["role"] == "assistant":
        raise RequestRefused(
            "the last message is the assistant's; an answer cannot be begun for it",
            param="messages",
        )
    return messages


def _user(blocks: Sequence[Mapping[str, JSON]], where: str) -> Iterator[Message]:
    """Results of tools are messages of their own; text between them is the user's."""
    said: list[str] = []
    for place, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            said.append(_block_text(block, f"{where}.{place}"))
            continue
        if said:
            yield {"role": "user", "content": "".join(said)}
            said = []
        yield _tool_result(block, f"{where}.{place}")
    if said or not blocks:
        yield {"role": "user", "content": "".join(said)}


def _tool_result(block: Mapping[str, JSON], where: str) -> Message:
    name = block.get("tool_use_id")
    if not isinstance(name, str):
        raise RequestRefused(f"{where}.tool_use_id must be a string", param=where)
    content = block.get("content")
    text = "" if content is None else _text(content, f"{where}.content")
    failed = fields.flag(block, "is_error")
    # No chat format has a place for the flag; a failure without words must not look like a result.
    message: Message = {"role": "tool", "tool_call_id": name, "content": text}
    if failed:
        message["content"] = text or "error"
    return message


def _assistant(blocks: Sequence[Mapping[str, JSON]], where: str) -> Message:
    said, thought, calls = [], [], []
    for place, block in enumerate(blocks):
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                thought.append(text)
            case {"type": "redacted_thinking"}:
                pass  # sealed by another model; there is nothing to read
            case {"type": "text", "text": text} if text == _FILLER:
                pass
            case {"type": "tool_use", "id": str(name), "name": str(function), "input": dict(given)}:
                arguments = json.dumps(given, ensure_ascii=False)
                call = {"name": function, "arguments": arguments}
                calls.append({"id": name, "type": "function", "function": call})
            case _:
                said.append(_block_text(block, f"{where}.{place}"))
    message: Message = {"role": "assistant", "content": "".join(said) or None}
    if thought:
        message["reasoning_content"] = "".join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: JSON, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(f"{where} must be text or text blocks", param=where)
    return "".join(_block_text(block, f"{where}.{n}") for n, block in enumerate(content))


def _block_text(block: JSON, where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            raise RequestRefused(f"{where}: {kind} is not supported here", param=where)
    raise RequestRefused(f"{where} must be a content block", param=where)


def _tools(body: Body) -> list[dict[str, JSON]]:
    tools = []
    for place, tool in enumerate(fields.objects(body, "tools")):
        where = f"tools.{place}"
        if tool.get("type", "custom") not in ("custom", None):
            raise RequestRefused(
                f"{where}: tools of type {tool['type']!r} run at the provider, which is not here",
                param=where,
            )
        check_function(tool, where, "input_schema")
        tools.append(function_tool(tool, "input_schema"))
    check_names(tools)
    return tools


def _forced(choice: Body, tools: Sequence[dict[str, JSON]]) -> ForcedCall | None:
    names = tuple(tool["function"]["name"] for tool in tools)
    match choice.get("type"):
        case None | "auto" | "none":
            return None
        case "any":
            return forced_call(names)
        case "tool" if isinstance(choice.get("name"), str):
            return forced_call(names, (choice["name"],))
    raise RequestRefused("tool_choice.type must be auto, any, tool or none", param="tool_choice")


def _json_output(body: Body) -> JsonOutput | None:
    """`output_config.format`, and `output_format` as it was called before."""
    given = fields.mapping(body, "output_config").get("format") or body.get("output_format")
    match given:
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema)}:
            return JsonOutput(schema)
    raise RequestRefused("the output format must be a json_schema", param="output_config.format")
