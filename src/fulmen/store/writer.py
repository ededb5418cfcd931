"""One thread that writes: whatever is waiting goes into one transaction.

A commit costs the same for one change as for a hundred, so under load the store gets faster per
change. Each change runs in a savepoint of its own: one that is refused does not spoil the others.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from fulmen.schema.errors import FulmenError, StoreError

T = TypeVar("T")
Change = Callable[[Connection], T]

_MOST_AT_ONCE = 512
_MOST_WAITING = 10_000
"""Beyond it, whoever wants to write waits: memory stays bounded."""


@dataclass(frozen=True, slots=True)
class _Job:
    change: Change[Any]
    future: "Future[Any]"


class Writer:
    """Runs changes in the order they were given."""

    def __init__(self, engine: Engine, committed: Callable[[], None]) -> None:
        """`committed` is called in the writer's thread after every commit."""
        self._engine = engine
        self._committed = committed
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, change: Change[T]) -> "Future[T]":
        """Queue a change; the future resolves when it is on disk, or refuses with its error."""
        if self._closed:
            raise StoreError("the store is closed")
        future: Future[T] = Future()
        self._jobs.put(_Job(change, future))
        return future

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs, last = [job], False
            while len(jobs) < _MOST_AT_ONCE and not last:
                try:
                    following = self._jobs.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    last = True
                else:
                    jobs.append(following)
            self._commit(jobs)
            if last:
                return

    def _commit(self, jobs: list[_Job]) -> None:
        """Run the jobs in one transaction and tell their owners."""
        done: list[tuple[_Job, object]] = []
        refused: list[tuple[_Job, Exception]] = []
        try:
            with self._engine.begin() as connection:
                for job in jobs:
                    try:
                        with connection.begin_nested():
                            done.append((job, job.change(connection)))
                    except FulmenError as error:
                        refused.append((job, error))
                    except IntegrityError as error:
                        refused.append((job, as_store_error(error, self._engine)))
        except Exception as error:  # the transaction is lost, and with it every change in it
            failure = as_store_error(error, self._engine)
            refused = [(job, failure) for job in jobs]
            done = []
        for job, value in done:
            job.future.set_result(value)
        for job, error in refused:
            job.future.set_exception(error)
        if done:
            self._committed()


def as_store_error(error: Exception, engine: Engine) -> StoreError:
    """A database error in words: what could not be written, and what to do."""
    where = engine.url.database or "the store"
    cause = getattr(error, "orig", None) or error
    text = str(cause)
    if "disk is full" in text or "No space left" in text:
        return StoreError(
            f"{where}: no space left on device", hint="free some space, then go on with --resume"
        )
    kind = "" if isinstance(error, SQLAlchemyError) else f"{type(error).__name__}: "
    return StoreError(f"{where}: cannot be written ({kind}{text[:200]})")
