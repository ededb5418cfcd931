"""OpenAI's chat completions: answers as they go over the wire, one body or a stream of events."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import orjson

from fulmen.gateway import fields
from fulmen.gateway.errors import openai_error, server_failed
from fulmen.gateway.exchange import Choice, Exchange, assistant_message
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
    chunks = _Chunks(exchange)
    sent = [{"content": "", "reasoning_content": ""} for _ in exchange.choices]
    for place in range(len(sent)):
        yield chunks.chunk(place, {"role": "assistant", "content": ""})
    try:
        async with aclosing(exchange.stream()) as pieces:
            async for place, name, text in pieces:
                sent[place][name] += text
                yield chunks.chunk(place, {name: text})
    except FulmenError as error:
        yield _data(openai_error(server_failed(error)))
        return
    for place, choice in enumerate(exchange.choices):
        for delta in _rest(choice, sent[place]):
            yield chunks.chunk(place, delta)
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
        return _data(self._head | {"choices": choices} | more)

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


def _data(body: JSON) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _rest(choice: Choice, sent: dict[str, str]) -> Iterator[dict[str, JSON]]:
    """What the whole message holds beyond what was streamed."""
    message = assistant_message(choice)
    for name, before in sent.items():
        whole = message.get(name) or ""
        if whole.startswith(before) and len(whole) > len(before):
            yield {name: whole[len(before) :]}
    if calls := message.get("tool_calls"):
        yield {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}
