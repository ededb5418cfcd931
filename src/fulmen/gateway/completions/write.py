"""OpenAI's completions: answers as they go over the wire, one body or a stream of events."""

from collections.abc import AsyncGenerator, Sequence

from fulmen.gateway import fields
from fulmen.gateway.chat.write import usage
from fulmen.gateway.errors import openai_error, server_failed
from fulmen.gateway.exchange import Choice, Exchange
from fulmen.gateway.pieces import Pieces, event
from fulmen.schema.errors import FulmenError
from fulmen.schema.records import JSON


def completion_body(exchange: Exchange) -> dict[str, JSON]:
    """The body of an answer that is sent as a whole."""
    choices = [
        _choice(
            place,
            choice.answer.content,
            logprobs=_logprobs(exchange, choice),
            finish_reason=choice.finish_reason,
        )
        for place, choice in enumerate(exchange.choices)
    ]
    return {**_head(exchange), "choices": choices, "usage": usage(exchange)}


async def events(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    head, pieces = _head(exchange), Pieces(exchange)
    try:
        async for place, _, text in pieces.arriving():
            yield event({**head, "choices": [_choice(place, text)]})
    except FulmenError as error:
        yield event(openai_error(server_failed(error)))
        return
    for place, choice in enumerate(exchange.choices):
        last = _choice(
            place,
            "".join(text for _, _, text in pieces.missing(choice)),
            logprobs=_logprobs(exchange, choice),
            finish_reason=choice.finish_reason,
        )
        yield event({**head, "choices": [last]})
    if fields.flag(fields.mapping(exchange.request.body, "stream_options"), "include_usage"):
        yield event({**head, "choices": [], "usage": usage(exchange)})
    yield b"data: [DONE]\n\n"


def _head(exchange: Exchange) -> dict[str, JSON]:
    return {
        "id": exchange.id,
        "object": "text_completion",
        "created": int(exchange.started),
        "model": exchange.request.model,
    }


def _choice(
    place: int, text: str, *, logprobs: JSON = None, finish_reason: str | None = None
) -> dict[str, JSON]:
    return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(exchange: Exchange, choice: Choice) -> JSON:
    if not exchange.request.logprobs:
        return None
    completion = choice.completion
    texts = [exchange.token_text(token) for token in completion.ids]
    return {
        "tokens": texts,
        "token_logprobs": list(completion.logprobs),
        "top_logprobs": [
            {exchange.token_text(token): value for token, value in likely}
            for likely in completion.top
        ]
        or None,
        "text_offset": _offsets(texts),
    }


def _offsets(texts: Sequence[str]) -> list[int]:
    """Where each text begins, counted from the beginning of the completion.

    >>> _offsets(["one", " two", "!"])
    [0, 3, 7]
    """
    offsets, end = [], 0
    for text in texts:
        offsets.append(end)
        end += len(text)
    return offsets
