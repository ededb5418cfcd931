"""Waking those who wait for a rollout's end, on whatever event loop they wait."""

import threading
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError

from fulmen.schema.errors import StoreError


class Watch:
    """Who waits for which rollouts. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[str, set[Future[None]]] = {}
        self._end: StoreError | None = None

    def register(self, rollout_ids: Iterable[str]) -> "Future[None]":
        """A future that resolves when one of the rollouts finishes from now on."""
        waiter: Future[None] = Future()
        with self._lock:
            if self._end:
                waiter.set_exception(self._end)
            for name in rollout_ids:
                self._waiters.setdefault(name, set()).add(waiter)
        return waiter

    def forget(self, rollout_ids: Iterable[str], waiter: "Future[None]") -> None:
        """Undo `register`."""
        with self._lock:
            for name in rollout_ids:
                others = self._waiters.get(name, set())
                others.discard(waiter)
                if not others:
                    self._waiters.pop(name, None)

    def finished(self, rollout_ids: Iterable[str]) -> None:
        """Wake all who wait for one of these."""
        with self._lock:
            woken = {w for name in rollout_ids for w in self._waiters.get(name, ())}
        for waiter in woken:
            _wake(waiter, None)

    def look_again(self) -> None:
        """Wake everyone: nobody knows what has finished."""
        with self._lock:
            woken = {w for waiters in self._waiters.values() for w in waiters}
        for waiter in woken:
            _wake(waiter, None)

    def stop(self, reason: StoreError) -> None:
        """Wake everyone with an error, those who come later as well."""
        with self._lock:
            self._end = reason
            woken = {w for waiters in self._waiters.values() for w in waiters}
        for waiter in woken:
            _wake(waiter, reason)


def _wake(waiter: "Future[None]", error: StoreError | None) -> None:
    try:
        if error:
            waiter.set_exception(error)
        else:
            waiter.set_result(None)
    except InvalidStateError:
        return  # woken by an earlier commit, or no longer waiting
