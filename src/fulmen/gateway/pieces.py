"""A streamed answer: what was sent of each completion, and what is still missing at its end."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import orjson

from fulmen.gateway.exchange import Choice, Exchange, Piece
from fulmen.schema.records import JSON

# Line ends to Python's `splitlines`, with which some clients cut a stream; JSON may escape them.
_LINE_ENDS = tuple((mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in "\x85\u2028\u2029")


class Pieces:
    """The text of an exchange, piece by piece, each piece once."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._sent = [{"reasoning_content": "", "content": ""} for _ in exchange.choices]

    async def arriving(self) -> AsyncGenerator[Piece, None]:
        """Text as it becomes certain. Raises FulmenError if the engine or the store fails."""
        async with aclosing(self._exchange.stream()) as pieces:
            async for piece in pieces:
                place, name, text = piece
                self._sent[place][name] += text
                yield piece

    def missing(self, choice: Choice) -> list[Piece]:
        """Text of a complete answer beyond what has arrived: only the end makes it certain."""
        place = self._exchange.choices.index(choice)
        rest: list[Piece] = []
        for name, before in self._sent[place].items():
            answer = choice.answer
            whole = answer.content if name == "content" else answer.reasoning or ""
            if whole.startswith(before) and len(whole) > len(before):
                rest.append((place, name, whole[len(before) :]))
        return rest


def event(body: JSON, name: str = "") -> bytes:
    """One server-sent event.

    >>> event({"a": 1}, "ping")
    b'event: ping\\ndata: {"a":1}\\n\\n'
    """
    data = orjson.dumps(body)
    for mark, escape in _LINE_ENDS:
        data = data.replace(mark, escape)
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"
