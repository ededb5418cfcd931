"""Answers of chat completions as they go over the wire: one body, or a stream of events."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import orjson

from fulmen.gateway.chat import usage
from fulmen.gateway.errors import server_failed
from fulmen.gateway.service import Choice, Exchange
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
                "message": choice.message,
                "logprobs": _logprobs(exchange, choice),
                "finish_reason": choice.finish_reason,
            }
            for place, choice in enumerate(exchange.choices)
        ],
        "usage": usage(exchange.prompt_tokens, exchange.completion_tokens),
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
    """The answer as server-sent events: the same content as `_completion`, piece by piece."""

    def chunk(place: int, delta: dict[str, JSON], finish: str | None = None) -> bytes:
        choice: dict[str, JSON] = {"index": place, "delta": delta, "finish_reason": finish}
        if finish is not None:
            choice["logprobs"] = _logprobs(exchange, exchange.choices[place])
        return _event(exchange, [choice])

    sent = [{"content": "", "reasoning_content": ""} for _ in exchange.choices]
    for place in range(len(sent)):
        yield chunk(place, {"role": "assistant", "content": ""})
    try:
        async with aclosing(exchange.stream()) as pieces:
            async for place, name, text in pieces:
                sent[place][name] += text
                yield chunk(place, {name: text})
    except FulmenError as error:
        yield b"data: " + orjson.dumps(server_failed(error).body) + b"\n\n"
        return
    for place, choice in enumerate(exchange.choices):
        for delta in _rest(choice, sent[place]):
            yield chunk(place, delta)
        yield chunk(place, {}, choice.finish_reason)
    if exchange.request.include_usage:
        yield _event(exchange, [], usage(exchange.prompt_tokens, exchange.completion_tokens))
    yield b"data: [DONE]\n\n"


def _rest(choice: Choice, sent: dict[str, str]) -> Iterator[dict[str, JSON]]:
    """What the whole message holds beyond what was streamed."""
    for name, before in sent.items():
        whole = choice.message.get(name) or ""
        if whole.startswith(before) and len(whole) > len(before):
            yield {name: whole[len(before) :]}
    if calls := choice.message.get("tool_calls"):
        yield {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}


def _event(exchange: Exchange, choices: list[JSON], counts: JSON = None) -> bytes:
    body: dict[str, JSON] = {
        "id": exchange.id,
        "object": "chat.completion.chunk",
        "created": int(exchange.started),
        "model": exchange.request.model,
        "choices": choices,
    }
    if exchange.request.include_usage:
        body["usage"] = counts
    return b"data: " + orjson.dumps(body) + b"\n\n"
