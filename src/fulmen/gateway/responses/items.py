"""Items of OpenAI's responses as messages of chat completions.

An answer is several items there (reasoning, text, each call) and one message here; so is a turn of
the assistant that comes back in a request.
"""

from collections.abc import Callable, Sequence

from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.render import Message
from fulmen.schema.records import JSON

Known = Callable[[str], JSON]
"""The item with this id that was given out before; None if there is none."""

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def to_messages(items: Sequence[JSON], known: Known) -> list[Message]:
    """Read the items of a request.

    Raises:
        RequestRefused: an item of a kind that is not supported, or not as it must be.
    """
    messages: list[Message] = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        _add(messages, _referred(item, known, where), where)
    return messages


def _referred(item: JSON, known: Known, where: str) -> JSON:
    """The item itself, or the one that it refers to."""
    match item:
        case {"type": "item_reference", "id": str(name)}:
            item = known(name)
            if item is None:
                raise RequestRefused(f"Item {name[:100]!r} not found.", status=404, param=where)
    return item


def _add(messages: list[Message], item: JSON, where: str) -> None:
    match item:
        case {"type": "reasoning"}:
            text = _text(item.get("content") or item.get("summary") or [], where)
            if text:
                _turn(messages, "reasoning_content")["reasoning_content"] = text
        case {"type": "function_call", "call_id": str(name), "name": str(function)}:
            arguments = item.get("arguments")
            if not isinstance(arguments, str):
                raise RequestRefused(f"{where}.arguments must be a string", param=where)
            called = {"name": function, "arguments": arguments}
            turn = _turn(messages, "tool_calls")
            turn.setdefault("tool_calls", []).append(
                {"id": name, "type": "function", "function": called}
            )
        case {"type": "function_call_output", "call_id": str(name)}:
            content = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": name, "content": content})
        case {"role": "assistant"} if item.get("type") in (None, "message"):
            text = _text(item.get("content"), f"{where}.content")
            _turn(messages, "content")["content"] = text
        case {"role": "user" | "system" | "developer" as role} if item.get("type") in (
            None,
            "message",
        ):
            messages.append({"role": role, "content": _text(item.get("content"), where)})
        case {"type": str(kind)}:
            raise RequestRefused(f"{where}: items of type {kind!r} are not supported", param=where)
        case _:
            raise RequestRefused(f"{where} must be an item with a type or a role", param=where)


_ORDER = ("reasoning_content", "content", "tool_calls")


def _turn(messages: list[Message], part: str) -> Message:
    """The assistant's turn that a part belongs to: the last one, unless it is past that part."""
    last = messages[-1] if messages else {}
    later = _ORDER[_ORDER.index(part) + (part == "tool_calls") :]
    if last.get("role") != "assistant" or any(last.get(name) for name in later):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _text(content: JSON, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(f"{where} must be text or a list of parts", param=where)
    return "".join(_part(part, where) for part in content)


def _part(part: JSON, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise RequestRefused(f"{where}: parts of type {kind!r} are not supported", param=where)
    return text
