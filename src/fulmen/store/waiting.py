"""Waking those who wait for a commit, on whatever event loop they wait."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Bell:
    """Rung after every commit; any number of coroutines on any number of loops listen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def ring(self) -> None:
        """Wake all listeners; callable from any thread."""
        with self._lock:
            listeners = list(self._listeners)
        for loop, event in listeners:
            # A loop that was closed has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    async def until(self, look: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
        """Call `look` now and after every ring until it returns something, or the time is over.

        Returns the last thing it returned.
        """
        event = asyncio.Event()
        entry = (asyncio.get_running_loop(), event)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            self._listeners.add(entry)
        try:
            while not (found := await look()):
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), left)
                event.clear()
            return found
        finally:
            with self._lock:
                self._listeners.discard(entry)
