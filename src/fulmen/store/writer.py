"""One thread that writes: all changes that are waiting go into one transaction (group commit).

A commit costs the same for one change as for a hundred, so the busier the store, the cheaper a
change. Changes of one kind are done at once (`fulmen.store.jobs`), in a savepoint; if one of them
is refused, each is done alone in its own, and that one undoes only itself.

A transaction that meets a passing trouble (a server restarted, a deadlock) is tried again as a
whole, for as long as the database's patience lasts. If only the answer to its commit was lost, it
is not done twice: batches are numbered, and each marks its number in its own transaction.

A change whose caller does not wait for it was promised to be kept. If it cannot be, nothing that
comes after may pretend that it was: the writer stops, and everyone gets the reason.
"""

import asyncio
import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import InvalidStateError
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from fulmen.schema.errors import FulmenError, StoreError
from fulmen.store.answers import Answers
from fulmen.store.database import Change, Database
from fulmen.store.jobs import Job, Work, do, grouped

T = TypeVar("T")
CAPACITY = 4096
"""Changes that may wait; whoever brings more waits as well, so that memory stays bounded."""

_log = logging.getLogger(__name__)

_SHORTEST_S, _LONGEST_S = 0.05, 2.0
"""Pauses between tries."""
_SHORTEST_REST_S = 0.001
"""A rollout that is due in less is asked for after it."""

Done = tuple[Job[Any], Change[Any] | Exception]


def patiently(database: Database, once: Callable[[], T]) -> T:
    """Do it, again while what goes wrong may pass and the database's patience lasts.

    Raises:
        DBAPIError: it did not pass.
    """
    until, pause = time.monotonic() + database.patience_s, _SHORTEST_S
    told = False
    while True:
        try:
            return once()
        except DBAPIError as error:
            left = until - time.monotonic()
            if left <= 0 or not database.passes(error):
                raise
            if not told:
                _log.warning("%s; trying again for %.0f s", database.explain(error).message, left)
            told = True
        time.sleep(min(pause, max(left, 0)))
        pause = min(2 * pause, _LONGEST_S)


class Writer:
    """Runs work in the order given, on a thread of its own."""

    def __init__(
        self,
        database: Database,
        *,
        announce: Callable[[Change[Any]], None],
        stopped: Callable[[StoreError], None],
    ) -> None:
        """Start the thread.

        Args:
            database: where the transactions run.
            announce: called in the writer's thread after each change has been committed.
            stopped: called once when the writer is closed or stops, with the reason.
        """
        self._database, self._announce, self._stopped = database, announce, stopped
        self.answers = Answers()
        """How to wait for jobs."""
        self._changed = threading.Condition()
        self._waiting: deque[Job[Any]] = deque()
        self._end: StoreError | None = None
        self._wakes_elsewhere: float = 0
        self._due = math.inf
        """When the first of the rollouts that rest can be claimed, by the monotonic clock."""
        # Only the thread touches these.
        self._parked: deque[Job[Any]] = deque()
        self._wakes: float = 0
        self._committed = 0  # batches
        self._in_doubt = False  # a batch may have been committed, and there was no answer
        self._thread = threading.Thread(target=self._run, name="fulmen-store", daemon=True)
        self._thread.start()

    async def run(self, work: Work[T], touches: Iterable[str] = ()) -> T:
        """Do the work, which changes these rollouts, and return its value once it is on disk."""
        job = Job(work, touches=frozenset(touches))
        await self.submit(job)
        try:
            await self.answers.of(job.future)
        finally:
            job.future.cancel()  # nobody waits for it any more; too late for most
        return job.future.result()

    async def submit(self, job: Job[Any]) -> None:
        """Queue a job; waits while too many are queued.

        Raises:
            StoreError: the writer is closed, or has stopped because it lost what it had promised.
        """
        if not self.offer(job, block=False):
            await asyncio.to_thread(self.offer, job, block=True)

    def offer(self, job: Job[Any], *, block: bool) -> bool:
        """Queue a job; returns False if there is no room. Raises as `submit` does."""
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self._end or len(self._waiting) < CAPACITY)
            self.check()
            if len(self._waiting) >= CAPACITY:
                return False
            self._waiting.append(job)
            self._changed.notify_all()
            return True

    def later(self, job: Job[Any]) -> None:
        """Queue a job for which nobody waits, even if there is no room.

        It is dropped if the writer has ended: its promise dies with the process anyway.
        """
        with self._changed:
            if not self._end:
                self._waiting.append(job)
                self._changed.notify_all()

    def wake(self, queued: int | None, *, due_s: float | None = None) -> None:
        """Another process has queued so many rollouts; None: nobody knows how many.

        `due_s`: and others that can be claimed so many seconds from now.
        """
        with self._changed:
            self._wakes_elsewhere += math.inf if queued is None else queued
            self._set_alarm(due_s)
            self._changed.notify_all()

    def _set_alarm(self, due_s: float | None) -> None:
        if due_s is not None:
            self._due = min(self._due, time.monotonic() + max(due_s, _SHORTEST_REST_S))

    def check(self) -> None:
        """Raise StoreError if the writer is closed or has stopped."""
        if self._end:
            raise copy.copy(self._end)  # each caller gets a traceback of its own

    def close(self, reason: StoreError) -> StoreError | None:
        """Finish what is queued and end the thread.

        Returns why the writer had stopped before, or None if it had not.
        """
        with self._changed:
            before, self._end = self._end, self._end or reason
            self._changed.notify_all()
        self._thread.join()
        return before

    def _run(self) -> None:
        self.answers.collect()
        while (batch := self._next_batch()) is not None:
            if batch:
                self._commit(batch)
        assert self._end is not None
        for job in self._parked:
            _reject(job, self._end)
        self._stopped(self._end)
        self.answers.hand_out()

    def _next_batch(self) -> list[Job[Any]] | None:
        """All that can be run, claims that were parked first; None when the writer is to end."""
        with self._changed:
            if not (self._wakes and self._parked):
                self._wait()
            self._wakes += self._wakes_elsewhere
            self._wakes_elsewhere = 0
            if self._due <= time.monotonic():
                # Nobody knows how many are due by now; whoever finds none says when the next is.
                self._due, self._wakes = math.inf, math.inf
            arrived = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        self._parked = deque(job for job in self._parked if not job.future.cancelled())
        # A rollout serves at least one claim: waking more claims than rollouts were queued would
        # be work for nothing.
        woken = int(min(self._wakes, len(self._parked)))
        batch = [self._parked.popleft() for _ in range(woken)]
        self._wakes = 0
        for job in arrived:
            # Others wait already, so there was nothing to claim; it goes behind them.
            (self._parked if job.parks and self._parked else batch).append(job)
        return None if self._end and not (batch or arrived) else batch

    def _wait(self) -> None:
        """Until there is something to do; with claims parked, also for what comes due."""
        while not (self._waiting or self._wakes_elsewhere or self._end):
            left = self._due - time.monotonic() if self._parked else math.inf
            if left <= 0:
                return
            self._changed.wait(None if left == math.inf else left)

    def _commit(self, batch: list[Job[Any]]) -> None:
        wanted = [job for job in batch if not job.future.cancelled()]
        # What a cancelled claim was woken for is for the next in line.
        self._wakes += sum(job.parks for job in batch) - sum(job.parks for job in wanted)
        try:
            done = self._transact(wanted)
        except Exception as error:  # the transaction is undone, and so is every job of the batch
            failure = self._in_words(error)
            if self._in_doubt or any(job.promised for job in wanted):
                self._stop(failure)
            else:
                self._wakes = len(self._parked)
            for job in wanted:
                _reject(job, failure)
            self.answers.hand_out()
            return
        for job, outcome in done:
            self._settle(job, outcome)
        self.answers.hand_out()

    def _transact(self, wanted: list[Job[Any]]) -> list[Done]:
        """All jobs in one transaction, begun again while that may help."""
        done: list[Done] = []
        number = self._committed + 1

        def once() -> None:
            nonlocal done
            try:
                with self._database.writing.begin() as connection:
                    if not self._database.first_time(connection, number):
                        return  # what `done` holds was committed, and the answer was lost
                    done = self._do(connection, wanted)
            except DBAPIError as error:
                self._in_doubt |= self._database.passes(error)
                raise

        self._in_doubt = False
        patiently(self._database, once)
        self._committed = number
        return done

    def _do(self, connection: Connection, wanted: list[Job[Any]]) -> list[Done]:
        done: list[Done] = []
        # All in one order at once: two processes that want the same ones, each in the order of its
        # own work, would wait for each other.
        self._database.hold(connection, frozenset().union(*(job.touches for job in wanted)))
        for jobs in grouped(wanted):
            done += zip(jobs, self._attempt(connection, jobs), strict=True)
        changes = [outcome for _, outcome in done if isinstance(outcome, Change)]
        self._database.tell(connection, changes)
        return done

    def _attempt(
        self, connection: Connection, jobs: Sequence[Job[Any]]
    ) -> Sequence[Change[Any] | Exception]:
        """Run a group in a savepoint; where something is refused, each alone. Returns what came."""
        savepoint = connection.begin_nested()
        try:
            changes = do(connection, jobs)
        except Exception as error:
            # A failing disk spoils the whole transaction (SQLite may have undone it already), a
            # violated constraint, a value that cannot be kept or a refusal only the job.
            its_own = isinstance(error, IntegrityError | DataError)
            spoils = isinstance(error, DBAPIError) and not its_own
            alone = len(jobs) == 1
            if spoils or (alone and jobs[0].promised):
                raise
            savepoint.rollback()
            if alone:
                return [error]
            return [outcome for job in jobs for outcome in self._attempt(connection, [job])]
        savepoint.commit()
        return changes

    def _settle(self, job: Job[Any], outcome: Change[Any] | Exception) -> None:
        if isinstance(outcome, Exception):
            known = isinstance(outcome, FulmenError)
            self._wakes += job.parks
            _reject(job, outcome if known else self._in_words(outcome))
            return
        if outcome.due_s is not None:
            with self._changed:
                self._set_alarm(outcome.due_s)
        if job.parks and not outcome.value:
            self._parked.append(job)
            return
        self._wakes += outcome.queued
        try:
            self._announce(outcome)
        except Exception:
            # A listener's bug must not make a change look undone that is on disk.
            _log.exception("a listener of the store raised")
        if job.promised:
            return  # nobody waits
        try:
            job.future.set_result(outcome.value)
        except InvalidStateError:  # the caller was cancelled meanwhile
            job.unwanted(outcome.value)

    def _stop(self, reason: StoreError) -> None:
        with self._changed:
            self._end = reason
            lost = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        self._wakes = 0
        for job in lost:
            _reject(job, reason)
        self.answers.hand_out()

    def _in_words(self, error: Exception) -> StoreError:
        if isinstance(error, DBAPIError):
            words = self._database.explain(error)
        elif isinstance(error, StoreError):
            words = error
        else:
            words = StoreError(f"the store could not write: {type(error).__name__}: {error}")
        words.__cause__ = error if words is not error else None
        return words


def _reject(job: Job[Any], error: Exception) -> None:
    reason = copy.copy(error)
    reason.__cause__ = error.__cause__
    try:
        job.future.set_exception(reason)
    except InvalidStateError:
        return  # cancelled: nobody is waiting for it
