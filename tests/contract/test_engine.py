"""What every engine promises, asked of each of them."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fulmen.engine.base import GenerateRequest
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.engine.pytorch.serving import Serving
from fulmen.engine.remote import connect
from fulmen.engine.scripted import ScriptedEngine
from fulmen.schema.errors import ContextOverflow, EngineError

CONTEXT = 512
PROMPT = tuple(range(1, 40))


def local() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return LocalEngine(Qwen3ForCausalLM(config).eval(), name="m", max_context=CONTEXT, version=3)


def scripted() -> Any:
    def script(prompt):
        return [(7 * n + sum(prompt)) % 64 for n in range(CONTEXT)]

    return ScriptedEngine(script, name="m", max_context=CONTEXT, vocab_size=64, version=3)


@contextlib.asynccontextmanager
async def here(make: Callable[[], Any]) -> AsyncIterator[Any]:
    engine = make()
    yield engine
    await engine.close()


@contextlib.asynccontextmanager
async def remote() -> AsyncIterator[Any]:
    """A local engine, behind a socket."""
    near, far = socket.socketpair()
    engine = local()
    serving = Serving(far, {"policy": engine})
    thread = threading.Thread(target=serving.run)
    thread.start()
    _, engines = await connect(near, serving.served, {}, lambda: "gone")
    near_end: Any = engines["policy"]
    near_end.updating = serving.updating("policy")  # what is trained is at the far end
    yield near_end
    await near_end.close()
    thread.join()
    far.close()
    await engine.close()


@pytest.fixture(params=["local", "scripted", "remote"])
async def engine(request):
    kinds = {"local": lambda: here(local), "scripted": lambda: here(scripted), "remote": remote}
    async with kinds[request.param]() as engine:
        yield engine


def ask(count=12, prompt=PROMPT, **options) -> GenerateRequest:
    options = {"seed": 1, **options}
    return GenerateRequest(id="r", prompt_ids=prompt, max_tokens=count, **options)


async def deltas(engine, request):
    async with contextlib.aclosing(engine.generate(request)) as stream:
        return [delta async for delta in stream]


def tokens(got) -> tuple[int, ...]:
    return tuple(token for delta in got for token in delta.token_ids)


async def test_an_engine_says_what_it_serves(engine):
    assert (engine.info.model, engine.info.max_context, engine.info.vocab_size) == (
        "m",
        CONTEXT,
        64,
    )


async def test_only_the_last_delta_has_a_finish_reason(engine):
    got = await deltas(engine, ask())
    assert [d.finish_reason for d in got] == [None] * (len(got) - 1) + ["length"]


async def test_every_token_has_a_log_probability_and_the_version_that_sampled_it(engine):
    got = await deltas(engine, ask())
    assert len(tokens(got)) == 12
    for delta in got:
        assert len(delta.token_ids) == len(delta.logprobs)
        assert all(value <= 0 for value in delta.logprobs)
        assert delta.version == engine.version == 3


async def test_the_same_request_gives_the_same_tokens_again(engine):
    first, second = await deltas(engine, ask()), await deltas(engine, ask())
    assert tokens(first) == tokens(second)


async def test_without_streaming_the_same_comes_in_one_piece(engine):
    streamed = await deltas(engine, ask())
    (whole,) = await deltas(engine, ask(stream=False))
    assert len(streamed) > 1
    assert whole.token_ids == tokens(streamed)
    assert whole.logprobs == pytest.approx([p for d in streamed for p in d.logprobs], abs=1e-5)
    assert whole.finish_reason == "length"


async def test_a_stop_token_is_the_last_token(engine):
    ids = tokens(await deltas(engine, ask(30)))
    stop = ids[5]
    got = await deltas(engine, ask(30, stop_ids=frozenset({stop})))
    assert tokens(got) == ids[: ids.index(stop) + 1]
    assert got[-1].finish_reason == "stop"


async def test_a_stop_token_at_the_limit_is_a_stop(engine):
    ids = tokens(await deltas(engine, ask(30)))
    end = ids.index(ids[5]) + 1
    got = await deltas(engine, ask(end, stop_ids=frozenset({ids[5]})))
    assert got[-1].finish_reason == "stop"


async def test_the_most_likely_tokens_come_with_each_sampled_one(engine):
    (whole,) = await deltas(engine, ask(4, top_logprobs=1, temperature=0.0, stream=False))
    assert [pairs[0][0] for pairs in whole.top] == list(whole.token_ids)


@pytest.mark.parametrize(("prompt", "count"), [((), 4), ((1,) * CONTEXT, 1), ((1,), 0)])
async def test_what_cannot_fit_the_context_is_refused(engine, prompt, count):
    with pytest.raises(ContextOverflow):
        await deltas(engine, ask(count, prompt))


async def test_the_context_can_be_filled_to_the_last_token(engine):
    got = await deltas(engine, ask(3, (1,) * (CONTEXT - 3)))
    assert len(tokens(got)) == 3


async def test_requests_at_the_same_time_do_not_mix(engine):
    prompts = [PROMPT[n:] for n in range(6)]
    alone = [tokens(await deltas(engine, ask(prompt=p))) for p in prompts]
    together = await asyncio.gather(*(deltas(engine, ask(prompt=p)) for p in prompts))
    assert [tokens(got) for got in together] == alone


async def test_a_reader_who_leaves_does_not_disturb_the_others(engine):
    whole = tokens(await deltas(engine, ask(40)))
    leaving = engine.generate(ask(400, prompt=(5, 6)))
    await anext(leaving)
    staying = asyncio.ensure_future(deltas(engine, ask(40)))
    await leaving.aclose()
    assert tokens(await staying) == whole


async def test_tokens_after_an_update_carry_the_new_version(engine):
    stream = engine.generate(ask(400))
    first = await anext(stream)
    with engine.updating(4):
        pass
    versions = [first.version] + [delta.version async for delta in stream]
    assert versions == sorted(versions)
    assert (versions[0], versions[-1], engine.version) == (3, 4, 4)


async def test_closing_ends_what_runs_and_refuses_what_comes(engine):
    stream = engine.generate(ask(400))
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(EngineError, match="closed"):
        await deltas(engine, ask())
