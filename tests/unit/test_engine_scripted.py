"""The scripted engine: what only it can do."""

import asyncio
from typing import Any

import pytest

from fulmen.engine.base import GenerateRequest
from fulmen.engine.scripted import ScriptedEngine
from fulmen.schema.errors import EngineError


def ask(name="r", **options) -> GenerateRequest:
    return GenerateRequest(id=name, prompt_ids=(1, 2), max_tokens=8, **options)


async def test_replies_are_given_in_the_order_of_arrival_until_none_is_left():
    engine = ScriptedEngine([[5, 6], [7]])
    got = [[d.token_ids async for d in engine.generate(ask(stream=False))] for _ in range(2)]
    assert got == [[(5, 6)], [(7,)]]
    with pytest.raises(EngineError, match="no reply left"):
        await anext(engine.generate(ask()))
    assert engine.aborted == []


async def test_a_reply_that_ends_by_itself_is_a_stop():
    engine = ScriptedEngine([[5, 6]])
    got = [d async for d in engine.generate(ask())]
    assert [(d.logprobs, d.finish_reason) for d in got] == [((-0.5,), None), ((-1.0,), "stop")]


async def test_an_empty_reply_is_one_delta_without_tokens():
    (only,) = [d async for d in ScriptedEngine([[]]).generate(ask())]
    assert (only.token_ids, only.finish_reason) == ((), "stop")


async def test_held_tokens_wait_for_their_step():
    engine = ScriptedEngine([[5, 6, 7]])
    engine.hold()
    stream = engine.generate(ask())
    first = asyncio.ensure_future(anext(stream))
    done, _ = await asyncio.wait({first}, timeout=0)
    assert not done
    engine.step()
    assert (await first).token_ids == (5,)


async def test_a_version_published_between_two_tokens_splits_the_whole():
    engine = ScriptedEngine([[5, 6, 7]], version=1)
    engine.hold()
    reading = asyncio.ensure_future(_all(engine, ask(stream=False)))
    engine.step()
    while not engine.requests or not engine._released.locked():
        await asyncio.sleep(0)
    with engine.updating(2):
        pass
    engine.step(2)
    assert [(d.token_ids, d.version) for d in await reading] == [((5,), 1), ((6, 7), 2)]


async def test_a_reader_who_leaves_early_is_noted_and_one_who_stays_is_not():
    engine = ScriptedEngine([[5, 6], [7, 8]])
    stream: Any = engine.generate(ask("left"))
    await anext(stream)
    await stream.aclose()
    stream = engine.generate(ask("stayed"))
    while (await anext(stream)).finish_reason is None:
        pass
    await stream.aclose()
    assert engine.aborted == ["left"]
    assert [r.id for r in engine.requests] == ["left", "stayed"]


async def test_closing_wakes_a_reader_whose_tokens_are_held():
    engine = ScriptedEngine([[5]])
    engine.hold()
    reading = asyncio.ensure_future(_all(engine, ask()))
    while not engine.requests:
        await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await reading


async def _all(engine, request):
    return [delta async for delta in engine.generate(request)]
