"""OpenAI's chat completions: answers as they go over the wire, one body or a stream of events."""

from collections.abc import AsyncGenerator

from fulmen.gateway import fields
from fulmen.gateway.errors import openai_error, server_failed
from fulmen.gateway.exchange import Choice, Exchange, assistant_message
from fulmen.gateway.pieces import Pieces, event
from fulmen.schema.errors import FulmenError
from fulmen.schema.records import JSON


def completion_body(exchange: Exchange) -> dict[str, JSON]:
    """The body of an answer that is sent as a whole."""
    return {
        "id": exchange.id,
        "object": "chat.completion",
        "created": int(exchange.started),
        "model": exchange.request.model,
        "choices": [
            {
                "index": place,
                "message": assistant_message(choice),
                "logprobs": _logprobs(exchange, choice),
                "finish_reason": choice.finish_reason,
            }
            for place, choice in enumerate(exchange.choices)
        ],
        "usage": usage(exchange),
    }


def usage(exchange: Exchange) -> dict[str, int]:
    """Token counts, as chat completions and completions report them."""
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _logprobs(exchange: Exchange, choice: Choice) -> JSON:
    if not exchange.request.logprobs:
        return None
    completion = choice.completion

    def entry(token: int, logprob: float) -> dict[str, JSON]:
        text = exchange.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = []
    for place, (token, logprob) in enumerate(zip(completion.ids, completion.logprobs, strict=True)):
        likely = completion.top[place] if completion.top else ()
        content.append(
            {**entry(token, logprob), "top_logprobs": [entry(i, value) for i, value in likely]}
        )
    return {"content": content, "refusal": None}


async def events(exchange: Exchange) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events: the same content as the body, piece by piece."""
    chunks, pieces = _Chunks(exchange), Pieces(exchange)
    for place in range(len(exchange.choices)):
        yield chunks.chunk(place, {"role": "assistant", "content": ""})
    try:
        async for place, name, text in pieces.arriving():
            yield chunks.chunk(place, {name: text})
    except FulmenError as error:
        yield event(openai_error(server_failed(error)))
        return
    for place, choice in enumerate(exchange.choices):
        for _, name, text in pieces.missing(choice):
            yield chunks.chunk(place, {name: text})
        if calls := assistant_message(choice).get("tool_calls"):
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            yield chunks.chunk(place, {"tool_calls": numbered})
        yield chunks.last(place, choice)
    if chunks.counted:
        yield chunks.event([], usage=usage(exchange))
    yield b"data: [DONE]\n\n"


class _Chunks:
    """The chunks of one answer."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        options = fields.mapping(exchange.request.body, "stream_options")
        self.counted = fields.flag(options, "include_usage")
        self._head: dict[str, JSON] = {
            "id": exchange.id,
            "object": "chat.completion.chunk",
            "created": int(exchange.started),
            "model": exchange.request.model,
        }
        if self.counted:
            self._head["usage"] = None

    def event(self, choices: list[JSON], **more: JSON) -> bytes:
        """Any chunk."""
        return event(self._head | {"choices": choices} | more)

    def chunk(self, place: int, delta: dict[str, JSON]) -> bytes:
        """A piece of one choice."""
        return self.event([{"index": place, "delta": delta, "finish_reason": None}])

    def last(self, place: int, choice: Choice) -> bytes:
        """The end of one choice, with its log-probabilities."""
        end: dict[str, JSON] = {
            "index": place,
            "delta": {},
            "finish_reason": choice.finish_reason,
            "logprobs": _logprobs(self._exchange, choice),
        }
        return self.event([end])
