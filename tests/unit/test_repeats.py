"""Requests that come again."""

import asyncio

from fulmen.server.repeats import Repeats


async def test_work_that_was_dropped_does_not_end_what_was_asked_anew(caplog):
    repeats, gone = Repeats(), asyncio.get_running_loop().create_future()
    begun, go_on, runs = asyncio.Event(), asyncio.Event(), 0

    async def work() -> bytes:
        nonlocal runs
        runs += 1
        begun.set()
        await go_on.wait()
        return b"answer"

    first = asyncio.create_task(repeats.answer("name", work, left=gone))
    await begun.wait()
    seconds: list[asyncio.Task[bytes | None]] = []
    # At once: what was dropped is cancelled by then, but has not come to its end.
    gone.add_done_callback(
        lambda _: seconds.append(asyncio.create_task(repeats.answer("name", work)))
    )
    gone.set_result(None)
    assert await first is None
    for _ in range(3):  # what was dropped comes to its end while the other is under way
        await asyncio.sleep(0)
    go_on.set()
    assert [await second for second in seconds] == [b"answer"]
    assert await repeats.answer("name", work) == b"answer"
    assert runs == 2
    assert caplog.text == ""


async def test_what_one_request_was_answered_is_not_undone_because_another_has_gone():
    repeats, gone = Repeats(), asyncio.get_running_loop().create_future()
    begun, go_on, undone = asyncio.Event(), asyncio.Event(), list[str]()

    async def work() -> bytes:
        begun.set()
        await go_on.wait()
        own = asyncio.current_task()
        assert own is not None
        own.add_done_callback(lambda _: gone.set_result(None))  # at the same moment
        return b"leases"

    async def undo() -> None:
        undone.append("given back")

    there = asyncio.get_running_loop().create_future()
    second = asyncio.create_task(repeats.answer("name", work, left=there, undo=undo))
    await begun.wait()
    first = asyncio.create_task(repeats.answer("name", work, left=gone, undo=undo))
    await asyncio.sleep(0)
    go_on.set()
    assert (await second, await first) == (b"leases", None)
    assert undone == []
