"""OpenAI's responses as server-sent events: the full sequence, each event numbered."""

from collections.abc import AsyncGenerator, Iterator

from fulmen.gateway.exchange import Choice, Exchange
from fulmen.gateway.pieces import Pieces, event
from fulmen.gateway.responses.write import (
    call_items,
    message_item,
    reasoning_item,
    response_body,
    text_logprobs,
    text_part,
)
from fulmen.schema.errors import FulmenError
from fulmen.schema.records import JSON


async def events(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    """Serve the exchange; the last event is completed, incomplete or failed."""
    output = _Output(exchange)
    begun = response_body(exchange, "in_progress", output=[])
    yield output.event("response.created", response=begun)
    yield output.event("response.in_progress", response=begun)
    pieces = Pieces(exchange)
    try:
        async for _, name, text in pieces.arriving():
            for made in output.text(name, text):
                yield made
    except FulmenError as error:
        told = {"code": "server_error", "message": str(error)}
        failed = response_body(exchange, "failed", output=output.items, error=told)
        yield output.event("response.failed", response=failed)
        return
    (choice,) = exchange.choices
    for _, name, text in pieces.missing(choice):
        for made in output.text(name, text):
            yield made
    for made in output.end(choice):
        yield made
    whole = response_body(exchange, output=output.items)
    yield output.event(f"response.{whole['status']}", response=whole)


class _Output:
    """The items of a streamed answer, one open at a time."""

    def __init__(self, exchange: Exchange) -> None:
        self.items: list[JSON] = []
        """Those that are complete."""
        self._exchange = exchange
        self._number = -1
        self._open = ""
        self._text = ""

    def event(self, kind: str, **more: JSON) -> bytes:
        """The next event."""
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **more}, kind)

    def text(self, name: str, text: str) -> Iterator[bytes]:
        """A piece of reasoning or of text, in its item."""
        if self._open != name:
            yield from self._finish("completed", [])
            self._open, self._text = name, ""
            yield self._item_event("added", self._item("in_progress"))
            yield self._part_event("added", self._part([]))
        self._text += text
        more: dict[str, JSON] = {} if self._thinks else {"logprobs": []}
        yield self._text_event("delta", delta=text, **more)

    def end(self, choice: Choice) -> Iterator[bytes]:
        """What only the complete answer holds: the end of the text, and the calls."""
        answer, logprobs = choice.answer, text_logprobs(self._exchange, choice)
        if not (answer.content or answer.reasoning or answer.tool_calls):
            yield from self.text("content", "")
        cut = choice.finish_reason == "length"
        yield from self._finish("incomplete" if cut else "completed", logprobs)
        for item in call_items(self._exchange, choice):
            arguments, place = (
                item["arguments"],
                {"item_id": item["id"], "output_index": self._index},
            )
            begun = {**item, "status": "in_progress", "arguments": ""}
            yield self._item_event("added", begun)
            kind = "response.function_call_arguments"
            yield self.event(f"{kind}.delta", delta=arguments, **place)
            yield self.event(f"{kind}.done", name=item["name"], arguments=arguments, **place)
            yield self._item_event("done", item)
            self.items.append(item)

    def _finish(self, status: str, logprobs: list[JSON]) -> Iterator[bytes]:
        """Close the open item, if there is one."""
        if not self._open:
            return
        more: dict[str, JSON] = {} if self._thinks else {"logprobs": logprobs}
        yield self._text_event("done", text=self._text, **more)
        yield self._part_event("done", self._part(logprobs))
        item = self._item(status, logprobs)
        yield self._item_event("done", item)
        self.items.append(item)
        self._open = ""

    @property
    def _index(self) -> int:
        return len(self.items)

    @property
    def _thinks(self) -> bool:
        return self._open == "reasoning_content"

    def _part(self, logprobs: list[JSON]) -> JSON:
        if self._thinks:
            return {"type": "reasoning_text", "text": self._text}
        return text_part(self._text, logprobs)

    def _item(self, status: str, logprobs: list[JSON] | None = None) -> dict[str, JSON]:
        if self._thinks:
            return reasoning_item(self._exchange, self._text, status)
        content = [] if logprobs is None else [self._part(logprobs)]
        return message_item(self._exchange, content, status)

    def _item_event(self, change: str, item: JSON) -> bytes:
        return self.event(f"response.output_item.{change}", output_index=self._index, item=item)

    def _part_event(self, change: str, part: JSON) -> bytes:
        return self.event(f"response.content_part.{change}", part=part, **self._place())

    def _text_event(self, change: str, **more: JSON) -> bytes:
        kind = "reasoning_text" if self._thinks else "output_text"
        return self.event(f"response.{kind}.{change}", **more, **self._place())

    def _place(self) -> dict[str, JSON]:
        item = self._item("in_progress")
        return {"item_id": item["id"], "output_index": self._index, "content_index": 0}
