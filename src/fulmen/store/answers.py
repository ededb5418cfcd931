"""Answers on their way from the writer's thread to those who wait on event loops.

Waking an event loop from another thread costs a system call, and a fight for the interpreter; so a
batch of a hundred answers wakes each loop once.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from concurrent.futures import Future
from threading import get_ident
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Arrived: TypeAlias = "asyncio.Future[None]"


class Answers:
    """Waits for futures that a thread resolves. That thread collects them by calling `hand_out`."""

    def __init__(self) -> None:
        """Nothing is collected before `collect`."""
        self._collector = 0
        self._ready: dict[asyncio.AbstractEventLoop, list[Arrived]] = {}

    def collect(self) -> None:
        """What this thread resolves from now on waits for `hand_out`."""
        self._collector = get_ident()

    def hand_out(self) -> None:
        """Wake those whose futures this thread has resolved."""
        ready, self._ready = self._ready, {}
        for loop, arrived in ready.items():
            _tell(loop, arrived)

    async def of(self, future: "Future[T]", timeout_s: float | None = None) -> bool:
        """Whether the future is resolved in time; it goes on either way."""
        loop = asyncio.get_running_loop()
        arrived: Arrived = loop.create_future()

        def resolved(_: object) -> None:
            if get_ident() == self._collector:
                self._ready.setdefault(loop, []).append(arrived)
            else:
                _tell(loop, [arrived])

        future.add_done_callback(resolved)
        try:
            async with asyncio.timeout(timeout_s):
                await arrived
        except TimeoutError:
            return future.done()
        return True


def _tell(loop: asyncio.AbstractEventLoop, arrived: Iterable[Arrived]) -> None:
    with contextlib.suppress(RuntimeError):  # a closed loop has nobody left to wake
        loop.call_soon_threadsafe(_resolve, arrived)


def _resolve(arrived: Iterable[asyncio.Future[Any]]) -> None:
    for one in arrived:
        if not one.done():
            one.set_result(None)
