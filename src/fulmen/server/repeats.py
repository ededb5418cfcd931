"""Requests that come again, because their answer was lost on the way, get that same answer."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_KEPT_S = 120.0
_KEPT_BYTES = 32 * 2**20


@dataclass(slots=True)
class _Work:
    task: asyncio.Task[bytes]
    undo: Callable[[], Awaitable[None]] | None
    asked: int = 0
    """Requests that wait for it just now."""
    told: bool = False
    """A request that waited has its answer: it is not undone any more."""
    ended: float = 0.0


class Repeats:
    """Answers by the name of their request, for as long as it may come again."""

    def __init__(self, *, kept_s: float = _KEPT_S, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_s, self._kept_bytes = kept_s, kept_bytes
        self._works: OrderedDict[str, _Work] = OrderedDict()
        self._bytes = 0

    async def answer(
        self,
        name: str,
        work: Callable[[], Awaitable[bytes]],
        *,
        left: Awaitable[object] | None = None,
        undo: Callable[[], Awaitable[None]] | None = None,
    ) -> bytes | None:
        """What `work` returns, or returned before, or will to a request of this name.

        With `left`, which resolves when the client has gone, the work is not for its own sake: when
        nobody asks any more it is cancelled, or undone if it was done already. None is returned
        then.
        """
        one = self._works.get(name)
        if one is None:
            new = one = self._works[name] = _Work(asyncio.ensure_future(_run(work)), undo)
            one.task.add_done_callback(lambda _: self._done(name, new))
        if left is None:
            return await asyncio.shield(one.task)
        gone = asyncio.ensure_future(left)
        one.asked += 1
        try:
            await asyncio.wait({one.task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                one.told = True
                return one.task.result()
        finally:
            gone.cancel()
            one.asked -= 1
        if not (one.asked or one.told):
            await self._drop(name, one)
        return None

    async def aclose(self) -> None:
        """End what is under way."""
        tasks = [one.task for one in self._works.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drop(self, name: str, one: _Work) -> None:
        if self._works.get(name) is one:
            self._forget(name)
        if not one.task.done():
            one.task.cancel()
        elif one.undo is not None and not one.task.cancelled() and not one.task.exception():
            await one.undo()

    def _done(self, name: str, one: _Work) -> None:
        if self._works.get(name) is not one:
            return  # it was dropped, and may have been asked for anew
        if one.task.cancelled() or one.task.exception() is not None:
            self._forget(name)  # it may be tried again
            return
        one.ended = time.monotonic()
        self._works.move_to_end(name)
        self._bytes += len(one.task.result())
        self._make_room(one.ended - self._kept_s)

    def _make_room(self, before: float) -> None:
        for name, one in list(self._works.items()):
            if not one.ended:
                continue
            if one.ended > before and self._bytes <= self._kept_bytes:
                return
            self._forget(name)

    def _forget(self, name: str) -> None:
        one = self._works.pop(name, None)
        if one is not None and one.ended:
            self._bytes -= len(one.task.result())


async def _run(work: Callable[[], Awaitable[bytes]]) -> bytes:
    return await work()
