"""The attempts that ended of late, numbered, for those who follow them from another machine."""

import asyncio
import contextlib
import secrets
import threading
from collections import deque

from fulmen.store.verbs import Heard

_MOST = 20_000
"""Ends that are kept; who has missed more looks again."""
_GATHER_S = 0.005
"""Ends of one commit are told together."""

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Event]


class EndsList:
    """A list with an end and no beginning. Any thread may add to it.

    >>> ends = EndsList()
    >>> before = asyncio.run(ends.since("", 0, wait_s=0))
    >>> ends.add("r1", 1)
    >>> asyncio.run(ends.since(before.epoch, before.last, wait_s=0)).ended
    (('r1', 1),)
    """

    def __init__(self, most: int = _MOST) -> None:
        self._epoch = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._kept: deque[tuple[str, int]] = deque(maxlen=most)
        self._last = 0
        self._waiting: list[_Waiter] = []

    def add(self, rollout_id: str, attempt: int) -> None:
        """Note an end, and wake who waits; to be given to `on_attempt_end`."""
        with self._lock:
            self._kept.append((rollout_id, attempt))
            self._last += 1
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # a closed loop has nobody left to wake
                loop.call_soon_threadsafe(event.set)

    async def since(self, epoch: str, after: int, *, wait_s: float) -> Heard:
        """The ends behind number `after`; waits up to `wait_s` seconds for one."""
        event = asyncio.Event()
        heard = self._look(epoch, after, (asyncio.get_running_loop(), event) if wait_s else None)
        if heard is not None:
            return heard
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await event.wait()
                await asyncio.sleep(_GATHER_S)
        return self._look(epoch, after, None) or Heard(epoch=self._epoch, last=after)

    def _look(self, epoch: str, after: int, waiter: _Waiter | None) -> Heard | None:
        """What there is; None if nothing, and then the waiter is kept."""
        with self._lock:
            if not epoch:
                return Heard(epoch=self._epoch, last=self._last)
            count = self._last - after
            if epoch != self._epoch or not 0 <= count <= len(self._kept):
                return Heard(epoch=self._epoch, last=self._last, missed=True)
            if count:
                news = tuple(self._kept)[-count:]
                return Heard(epoch=self._epoch, last=self._last, ended=news)
            if waiter is not None:
                self._waiting.append(waiter)
            return None
