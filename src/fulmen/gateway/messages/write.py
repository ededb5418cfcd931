"""Anthropic's messages: answers as they go over the wire, one body or a stream of events."""

from collections.abc import AsyncGenerator, Iterator

import orjson

from fulmen.gateway.errors import server_failed
from fulmen.gateway.exchange import Choice, Exchange
from fulmen.gateway.messages.error import anthropic_error
from fulmen.gateway.pieces import Pieces, event
from fulmen.schema.errors import FulmenError
from fulmen.schema.records import JSON

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

_BLOCKS = {
    "reasoning_content": ("thinking", "thinking_delta"),
    "content": ("text", "text_delta"),
}
"""By the name of a piece: the type of its block, and of the changes to that."""


def message_body(exchange: Exchange) -> dict[str, JSON]:
    """The body of an answer that is sent as a whole."""
    (choice,) = exchange.choices
    answer = choice.answer
    blocks: list[JSON] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not (answer.reasoning or answer.tool_calls):
        blocks.append({"type": "text", "text": answer.content})
    blocks += _tool_uses(choice)
    return {
        **_head(exchange),
        "content": blocks,
        **_end(choice),
        "usage": _usage(exchange),
    }


async def events(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    pieces, blocks = Pieces(exchange), _Blocks()
    start = {**_head(exchange), "content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = {**_usage(exchange), "output_tokens": 0}
    yield _event("message_start", message=start)
    try:
        async for _, name, text in pieces.arriving():
            for made in blocks.text(name, text):
                yield made
    except FulmenError as error:
        yield event(anthropic_error(server_failed(error)), "error")
        return
    (choice,) = exchange.choices
    for _, name, text in pieces.missing(choice):
        for made in blocks.text(name, text):
            yield made
    for made in blocks.tools(choice):
        yield made
    yield _event("message_delta", delta=_end(choice), usage=_usage(exchange))
    yield _event("message_stop")


class _Blocks:
    """The content blocks of a streamed answer, one open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def text(self, name: str, text: str) -> Iterator[bytes]:
        """A piece of reasoning or of text, in its block."""
        kind, change = _BLOCKS[name]
        if self._open != kind:
            empty = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin(kind, {"type": kind, kind: "", **empty})
        yield self._change({"type": change, kind: text})

    def tools(self, choice: Choice) -> Iterator[bytes]:
        """All calls of tools, and the end of the last block."""
        for use in _tool_uses(choice):
            yield from self._begin("tool_use", {**use, "input": {}})
            given = orjson.dumps(use["input"]).decode()
            yield self._change({"type": "input_json_delta", "partial_json": given})
        if self._index < 0:  # an answer without any content still has a block
            yield from self._begin("text", {"type": "text", "text": ""})
        yield from self._finish()

    def _begin(self, kind: str, block: JSON) -> Iterator[bytes]:
        yield from self._finish()
        self._index, self._open = self._index + 1, kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _finish(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None

    def _change(self, delta: JSON) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _tool_uses(choice: Choice) -> list[dict[str, JSON]]:
    pairs = zip(choice.tool_call_ids, choice.answer.tool_calls, strict=True)
    return [
        {"type": "tool_use", "id": name, "name": call.name, "input": tool_input(call.arguments)}
        for name, call in pairs
    ]


def tool_input(arguments: str) -> dict[str, JSON]:
    """Arguments as the object that the protocol wants.

    >>> tool_input('{"a": 1}'), tool_input("[1]"), tool_input("{a")
    ({'a': 1}, {'arguments': [1]}, {'arguments': '{a'})
    """
    try:
        value = orjson.loads(arguments)
        orjson.dumps(value)  # deep nesting can be read, but not written
    except (orjson.JSONDecodeError, TypeError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _head(exchange: Exchange) -> dict[str, JSON]:
    return {
        "id": exchange.id,
        "type": "message",
        "role": "assistant",
        "model": exchange.request.model,
    }


def _end(choice: Choice) -> dict[str, JSON]:
    stopped = choice.completion.stopped_at
    reason = _STOP_REASONS.get(choice.finish_reason, "end_turn")
    return {
        "stop_reason": reason if stopped is None else "stop_sequence",
        "stop_sequence": stopped,
    }


def _usage(exchange: Exchange) -> dict[str, JSON]:
    return {
        "input_tokens": exchange.prompt_tokens,
        "output_tokens": exchange.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(kind: str, **more: JSON) -> bytes:
    return event({"type": kind, **more}, kind)
