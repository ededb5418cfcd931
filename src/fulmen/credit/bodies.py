"""What a call's request and answer say, whatever protocol they are in.

The gateway keeps every answer of a policy as a message of chat completions; answers of models
elsewhere are bodies as they came. Requests are bodies as they came. Nothing here raises: what is
not of a known shape says nothing.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from fulmen.schema.records import JSON


class Asked(NamedTuple):
    """A tool call in an answer, or in a conversation that is sent again."""

    id: str
    name: str
    arguments: str


class Told(NamedTuple):
    """What the model was told of a tool call."""

    id: str
    text: str
    failed: bool | None
    """As the protocol says; None where it has no word for it."""


def asked_tools(response: JSON) -> list[Asked]:
    """The tool calls of an answer, in order.

    >>> asked_tools({"content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}]})
    [Asked(id='t1', name='add', arguments='{}')]
    """
    body = response if isinstance(response, dict) else {}
    messages = [body, *(_object(choice.get("message")) for choice in _objects(body, "choices"))]
    found = [asked for message in messages for asked in _of_message(message)]
    return found + [asked for item in _objects(body, "output") for asked in _of_item(item)]


def repeated_tools(request: JSON) -> list[Asked]:
    """The tool calls of the conversation that a request sends."""
    body = request if isinstance(request, dict) else {}
    found = [asked for message in _objects(body, "messages") for asked in _of_message(message)]
    return found + [asked for item in _objects(body, "input") for asked in _of_item(item)]


def tool_results(request: JSON) -> Iterator[Told]:
    """What a request tells the model of its tool calls.

    >>> body = {"messages": [{"role": "user", "content": [
    ...     {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}]}]}
    >>> list(tool_results(body))
    [Told(id='t1', text='no', failed=True)]
    """
    body = request if isinstance(request, dict) else {}
    for message in _objects(body, "messages"):
        if message.get("role") == "tool":
            yield Told(str(message.get("tool_call_id", "")), text_of(message.get("content")), None)
        for block in _objects(message, "content"):
            if block.get("type") == "tool_result":
                # Anthropic: without the flag, the tool succeeded.
                failed = block.get("is_error") is True
                yield Told(str(block.get("tool_use_id", "")), text_of(block.get("content")), failed)
    for item in _objects(body, "input"):
        if item.get("type") == "function_call_output":
            yield Told(str(item.get("call_id", "")), text_of(item.get("output")), None)


def system_prompt(request: JSON) -> str:
    """What the model was told before the conversation; later system messages are part of that.

    >>> system_prompt({"messages": [{"role": "system", "content": "Be brief."},
    ...                             {"role": "user", "content": "Why?"}]})
    'Be brief.'
    """
    body = request if isinstance(request, dict) else {}
    said = [text_of(body.get("instructions")), text_of(body.get("system"))]
    for message in [*_objects(body, "messages"), *_objects(body, "input")]:
        if message.get("role") not in ("system", "developer"):
            break
        said.append(text_of(message.get("content")))
    return "\n".join(text for text in said if text)


def offered_tools(request: JSON) -> dict[str, JSON]:
    """Name to schema of the arguments; None for a tool without one.

    >>> offered_tools({"tools": [{"name": "add", "input_schema": {"type": "object"}}]})
    {'add': {'type': 'object'}}
    """
    body = request if isinstance(request, dict) else {}
    found: dict[str, JSON] = {}
    for tool in _objects(body, "tools"):
        inner = _object(tool.get("function")) or tool
        if isinstance(name := inner.get("name"), str):
            found[name] = inner.get("parameters", inner.get("input_schema"))
    return found


def answer_text(response: JSON) -> str:
    """The text of an answer."""
    body = response if isinstance(response, dict) else {}
    said = [text_of(body.get("content"))]
    for choice in _objects(body, "choices"):
        said.append(text_of(_object(choice.get("message")).get("content", choice.get("text"))))
    said += [text_of(item.get("content")) for item in _objects(body, "output")]
    return "".join(said)


def error_text(response: JSON) -> str:
    """Code and message of an error object, in OpenAI's or Anthropic's form; empty if it is none.

    >>> error_text({"error": {"message": "too long", "code": "context_length_exceeded"}})
    'context_length_exceeded: too long'
    """
    error = _object(_object(response).get("error"))
    return ": ".join(str(error[key]) for key in ("code", "message") if error.get(key))


def text_of(content: JSON) -> str:
    """Text, or the text of a list of typed parts; of any other value, its JSON; of none, nothing.

    >>> text_of([{"type": "text", "text": "4"}]), text_of([{"row": 4}]), text_of(None)
    ('4', '[{"row": 4}]', '')
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and "type" in p for p in content):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return json.dumps(content, ensure_ascii=False)


def canonical(arguments: JSON) -> str:
    """Arguments so that equal ones are equal text, whatever their spacing and order.

    >>> canonical('{"b": 1, "a": 2}') == canonical({"a": 2, "b": 1}), canonical("")
    (True, '{}')
    """
    value = arguments
    if isinstance(arguments, str):
        read = read_json(arguments)
        if read is None:
            return arguments.strip() or "{}"
        (value,) = read
    return json.dumps(value if value is not None else {}, sort_keys=True, default=str)


def read_json(text: str) -> tuple[JSON] | None:
    """The value in a tuple; None if the text is no JSON.

    >>> read_json("null"), read_json("nil"), read_json("NaN")
    ((None,), None, None)
    """
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> JSON:
    raise ValueError(word)


def _of_message(message: dict[str, Any]) -> Iterator[Asked]:
    for call in _objects(message, "tool_calls"):
        function = _object(call.get("function"))
        arguments = text_of(function.get("arguments"))
        yield Asked(str(call.get("id", "")), str(function.get("name", "")), arguments)
    for block in _objects(message, "content"):
        if block.get("type") == "tool_use":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            yield Asked(str(block.get("id", "")), str(block.get("name", "")), arguments)


def _of_item(item: dict[str, Any]) -> Iterator[Asked]:
    if item.get("type") == "function_call":
        arguments = text_of(item.get("arguments"))
        yield Asked(str(item.get("call_id", "")), str(item.get("name", "")), arguments)


def _objects(body: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = body.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _object(value: JSON) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
