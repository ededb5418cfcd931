"""The store over a SQL database: one thread that writes, readers beside it.

`fulmen.store.changes` and `fulmen.store.reads` hold the SQL; here is when it runs, and who is told.
`fulmen.store.database` is what differs between SQLite and PostgreSQL.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from fulmen.schema.errors import LeaseLost, StoreError
from fulmen.schema.records import (
    Call,
    Lease,
    Outcome,
    Reward,
    Rollout,
    RolloutResult,
    Span,
    Split,
    StepRecord,
)
from fulmen.store import changes, endings, leasing, reads, retention, rows, tables
from fulmen.store.base import AttemptEnded, Status
from fulmen.store.database import READERS, Change, Database
from fulmen.store.endings import Result
from fulmen.store.jobs import Alike, Job, Way
from fulmen.store.leasing import Claim
from fulmen.store.watch import Watch
from fulmen.store.writer import Writer, patiently

T = TypeVar("T")

_MARGIN_S = 60.0
"""What took longer between a commit and its notification is not asked for again."""

_keep_calls = functools.partial(changes.keep, table=tables.calls, counter="refused_calls")
_keep_spans = functools.partial(changes.keep, table=tables.spans, counter="refused_spans")


class SqlStore:
    """Implements `fulmen.store.base.Store`; made by `fulmen.store.open.open_store`.

    Any thread and any event loop may use it. Everything it answers is on disk.
    """

    def __init__(self, database: Database, secret: bytes) -> None:
        """Start writing, and listening to other processes; `secret` signs rollout keys.

        Raises:
            StoreError: the database cannot be listened to.
        """
        self.secret = secret
        """Signs rollout keys: what the gateway checks them with."""
        self._database = database
        self._take = functools.partial(leasing.take, secret=secret)
        self._readers = ThreadPoolExecutor(READERS, "fulmen-store-reader")
        self._watch = Watch()
        self._listeners: list[AttemptEnded] = []
        self._writer = Writer(database, announce=self._announce, stopped=self._watch.stop)
        self._closed = False
        try:
            database.listen(self._heard, self._look_again)
        except BaseException:
            self._writer.close(StoreError("the store is closed"))
            raise

    def on_attempt_end(self, callback: AttemptEnded) -> None:
        self._listeners.append(callback)

    async def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        new: dict[str, rows.Row] = {}
        for rollout in rollouts:
            new.setdefault(rollout.id, rows.rollout_row(rollout))
        return await self._write(lambda db: changes.enqueue(db, new))

    async def claim(
        self, worker: str, *, limit: int = 1, wait_s: float = 0.0, lease_s: float = 60.0
    ) -> list[Lease]:
        return await self.claim_for([(worker, limit)], wait_s=wait_s, lease_s=lease_s)

    async def claim_for(
        self, workers: Sequence[tuple[str, int]], *, wait_s: float = 0.0, lease_s: float = 60.0
    ) -> list[Lease]:
        """As `claim`, for several workers with the most that each of them takes: at once, first
        come, first served."""
        wanted = [(worker, limit) for worker, limit in workers if limit > 0]
        if not wanted:
            return []
        job: Job[list[Lease]] = Job(
            Alike(self._take, Claim(wanted, lease_s)),
            parks=wait_s > 0,
            unwanted=self._give_back,
        )
        try:
            await self._writer.submit(job)
            await self._writer.answers.of(job.future, wait_s if wait_s > 0 else None)
        except asyncio.CancelledError:
            # Too late to withdraw: the leases are on disk, and nobody will ever see them.
            if not job.future.cancel() and not job.future.exception():
                self._give_back(job.future.result())
            raise
        return [] if job.future.cancel() else job.future.result()

    async def give_back(self, leases: Sequence[Lease]) -> None:
        """Undo a claim whose leases nobody has seen; it costs the rollouts no attempt."""
        await self._write(lambda db: leasing.give_back(db, leases), _of(leases))

    async def heartbeat(self, leases: Sequence[Lease], *, lease_s: float = 60.0) -> list[Lease]:
        return await self._write(lambda db: leasing.renew(db, leases, lease_s), _of(leases))

    async def expire_leases(self, *, now: float | None = None) -> list[str]:
        return await self._write(lambda db: endings.expire(db, now))

    async def record_calls(self, calls: Sequence[Call]) -> None:
        new = [rows.call_row(call) for call in calls]
        await self._keep(_keep_calls, new)

    async def supersede_calls(self, rollout_id: str, attempt: int, ids: Sequence[str]) -> None:
        work = functools.partial(
            changes.supersede, rollout_id=rollout_id, attempt=attempt, call_ids=tuple(ids)
        )
        await self._writer.submit(Job(work, promised=True))

    async def record_spans(self, spans: Sequence[Span]) -> None:
        new = [rows.span_row(span) for span in spans]
        await self._keep(_keep_spans, new)

    async def finish(self, lease: Lease, outcome: Outcome) -> Status:
        whose = f"rollout {lease.rollout.id}, attempt {lease.attempt}"
        text = rows.to_text(outcome, f"the outcome of {whose}")
        result = Result(lease, outcome.failure, text)
        status = await self._write(Alike(endings.finish, result), _of([lease]))
        if isinstance(status, endings.Refused):
            raise LeaseLost(f"{whose}: {status.why}; its result was refused")
        return status

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return await self._write(lambda db: endings.cancel(db, rollout_ids), rollout_ids)

    async def wait_finished(
        self, rollout_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> list[str]:
        if not rollout_ids:
            return []
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Before looking: what finishes between the look and the wait is not missed.
            waiter = self._watch.register(rollout_ids)
            try:
                finished = await self._read(lambda db: reads.finished_of(db, rollout_ids))
                left = until - time.monotonic()
                if finished or left <= 0:
                    return finished
                woken = asyncio.wrap_future(waiter)
                await asyncio.wait_for(woken, None if left == math.inf else left)
            except TimeoutError:
                return []
            finally:
                self._watch.forget(rollout_ids, waiter)

    async def results(self, rollout_ids: Sequence[str]) -> list[RolloutResult]:
        return await self._read(lambda db: reads.results_of(db, rollout_ids))

    async def add_rewards(self, rewards: Sequence[Reward]) -> None:
        touches = [reward.rollout_id for reward in rewards]
        await self._write(lambda db: changes.add_rewards(db, rewards), touches)

    async def commit_step(self, step: StepRecord) -> None:
        text = rows.to_text(step, f"step {step.step}")
        await self._write(lambda db: changes.commit_step(db, step, text), step.consumed)

    async def add_checkpoint(self, step: int, folder: str) -> None:
        await self._write(lambda db: changes.add_checkpoint(db, step, folder))

    async def steps(self) -> list[StepRecord]:
        return await self._read(reads.steps)

    async def discard_after(self, step: int) -> int:
        return await self._write(lambda db: changes.discard_after(db, step))

    async def forget(self, split: Split, first: int, last: int) -> int:
        total = 0
        for step in range(first, last + 1):
            behind: int | None = -1
            while behind is not None:
                work = functools.partial(retention.empty, split=split, step=step, behind=behind)
                done = await self._write(work)
                total, behind = total + done.rollouts, done.behind
        return total

    async def counts(self) -> dict[str, int]:
        return await self._read(reads.counts)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        lost = await asyncio.to_thread(self._writer.close, StoreError("the store is closed"))
        # A look that nobody waits for any more still has its connection.
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._database.close)
        if lost:
            raise lost

    async def _keep(self, way: Way[Sequence[rows.Row], None], new: Sequence[rows.Row]) -> None:
        touches = frozenset(str(row["rollout_id"]) for row in new)
        await self._writer.submit(Job(Alike(way, new), touches=touches, promised=True))

    async def _write(
        self, work: Callable[[Connection], Change[T]], touches: Iterable[str] = ()
    ) -> T:
        return await self._writer.run(work, touches)

    async def _read(self, look: Callable[[Connection], T]) -> T:
        self._writer.check()
        if self._database.reading is None:
            return await self._writer.run(lambda db: Change(look(db)))
        running = asyncio.get_running_loop()
        return await running.run_in_executor(
            self._readers, self._look, self._database.reading, look
        )

    def _look(self, engine: Engine, look: Callable[[Connection], T]) -> T:
        def once() -> T:
            with engine.begin() as connection:  # one snapshot for all its queries
                return look(connection)

        try:
            return patiently(self._database, once)
        except DBAPIError as error:
            raise self._database.explain(error) from error

    def _heard(self, change: Change[None]) -> None:
        """Another process did this."""
        if change.queued or change.due_s is not None:
            self._writer.wake(change.queued, due_s=change.due_s)
        self._announce(change)

    def _look_again(self, missed_s: float) -> None:
        """Other processes may have done anything in the last so many seconds."""
        self._writer.wake(None)
        self._watch.look_again()
        if self._listeners and self._database.reading is not None:
            since = missed_s + _MARGIN_S
            ended = self._look(self._database.reading, lambda db: reads.ended_lately(db, since))
            self._announce(Change(None, ended=tuple(ended)))

    def _announce(self, change: Change[Any]) -> None:
        for rollout_id, attempt in change.ended:
            for listener in self._listeners:
                listener(rollout_id, attempt)
        self._watch.finished(change.finished)

    def _give_back(self, leases: list[Lease]) -> None:
        if leases:
            self._writer.later(Job(lambda db: leasing.give_back(db, leases)))


def _of(leases: Iterable[Lease]) -> list[str]:
    return [lease.rollout.id for lease in leases]
