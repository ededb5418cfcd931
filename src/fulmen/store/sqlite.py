"""The embedded store: one SQLite file in WAL mode, one writing thread, readers beside it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert

from fulmen.schema.codec import from_json, to_json
from fulmen.schema.errors import LeaseLost, StoreError
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import (
    Call,
    Lease,
    Outcome,
    Reward,
    Rollout,
    RolloutResult,
    Span,
    StepRecord,
)
from fulmen.store import tables as t
from fulmen.store.base import FINISHED, Status
from fulmen.store.lifecycle import after
from fulmen.store.reading import existing, read_results
from fulmen.store.rows import call_row, reward_row, rollout_row, span_row
from fulmen.store.waiting import Bell
from fulmen.store.writer import Writer

_KEY_MARGIN_S = 120.0
"""A rollout key outlives its attempt's deadline by this much, for clocks and slow ends."""

AttemptEnded = Callable[[str, int], None]
R = TypeVar("R")


class SqliteStore:
    """Implements `fulmen.store.base.Store`; made by `open_store`."""

    def __init__(self, engine: Engine, secret: bytes) -> None:
        self.secret = secret
        """What rollout keys are signed with."""
        self._engine = engine
        self._bell = Bell()
        self._writer = Writer(engine, self._bell.ring)
        self._attempt_ended: list[AttemptEnded] = []

    def on_attempt_end(self, callback: AttemptEnded) -> None:
        """Have `callback(rollout_id, attempt)` called when an attempt may no longer write."""
        self._attempt_ended.append(callback)

    async def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        def change(db: Connection) -> int:
            if not rollouts:
                return 0
            known = existing(db, [r.id for r in rollouts])
            rows = [rollout_row(r) for r in rollouts if r.id not in known]
            if rows:
                db.execute(insert(t.rollouts), rows)
            return len(rows)

        return await self._write(change)

    async def claim(
        self, worker: str, *, limit: int = 1, wait_s: float = 0.0, lease_s: float = 60.0
    ) -> list[Lease]:
        async def look() -> list[Lease]:
            # Looking without writing first: an idle worker that is woken costs no transaction.
            if not await self._read(_anything_queued):
                return []
            return await self._write(lambda db: self._claim(db, worker, limit, lease_s))

        return await self._bell.until(look, wait_s)

    def _claim(self, db: Connection, worker: str, limit: int, lease_s: float) -> list[Lease]:
        r = t.rollouts.c
        found = db.execute(
            select(r.id, r.attempt, r.record)
            .where(r.status == "queued")
            .order_by(r.position)
            .limit(limit)
        ).all()
        now = time.time()
        leases = []
        for rollout_id, attempts, record in found:
            rollout = from_json(Rollout, record)
            lease = Lease(
                rollout=rollout,
                attempt=attempts + 1,
                worker=worker,
                key=self._key(rollout, attempts + 1, now),
                expires=now + lease_s,
            )
            leases.append(lease)
            db.execute(
                update(t.rollouts)
                .where(r.id == rollout_id)
                .values(status="running", attempt=lease.attempt)
            )
            db.execute(
                insert(t.attempts).values(
                    rollout_id=rollout_id,
                    number=lease.attempt,
                    worker=worker,
                    started=now,
                    expires=lease.expires,
                )
            )
        return leases

    def _key(self, rollout: Rollout, attempt: int, now: float) -> str:
        claims = KeyClaims(
            rollout_id=rollout.id,
            attempt=attempt,
            expires=now + rollout.deadline_s + _KEY_MARGIN_S,
            seed=rollout.seed,
            sampling=rollout.sampling,
            trained=rollout.split == "train",
        )
        return mint_key(claims, self.secret)

    async def heartbeat(self, leases: Sequence[Lease], *, lease_s: float = 60.0) -> list[Lease]:
        def change(db: Connection) -> list[Lease]:
            lost = [lease for lease in leases if not _is_current(db, lease)]
            for lease in leases:
                if lease not in lost:
                    db.execute(
                        update(t.attempts)
                        .where(_attempt(lease.rollout.id, lease.attempt))
                        .values(expires=time.time() + lease_s)
                    )
            return lost

        return await self._write(change)

    async def expire_leases(self, *, now: float | None = None) -> list[str]:
        def change(db: Connection) -> list[str]:
            a = t.attempts.c
            at = time.time() if now is None else now
            over = db.execute(
                select(a.rollout_id, a.number, t.rollouts.c.record)
                .join_from(t.attempts, t.rollouts)
                .where(a.ended.is_(None), a.expires < at, t.rollouts.c.attempt == a.number)
            ).all()
            outcome = Outcome(failure="infrastructure", error="the worker's lease expired")
            for _, number, record in over:
                self._end(db, from_json(Rollout, record), number, outcome)
            return [rollout_id for rollout_id, _, _ in over]

        return await self._write(change)

    async def record_calls(self, calls: Sequence[Call]) -> None:
        def change(db: Connection) -> None:
            kept = [c for c in calls if _attempt_is_current(db, c.rollout_id, c.attempt)]
            if kept:
                rows = [call_row(c) for c in kept]
                db.execute(insert(t.calls).on_conflict_do_nothing(), rows)
            if len(kept) < len(calls):
                _count(db, "refused_calls", len(calls) - len(kept))

        self._writer.submit(change)

    async def record_spans(self, spans: Sequence[Span]) -> None:
        def change(db: Connection) -> None:
            for span in spans:
                row = span_row(span)
                statement = insert(t.spans).values(row)
                db.execute(
                    statement.on_conflict_do_update(
                        index_elements=["id"], set_={"record": row["record"]}
                    )
                )

        self._writer.submit(change)

    async def finish(self, lease: Lease, outcome: Outcome) -> Status:
        def change(db: Connection) -> Status | None:
            if not _is_current(db, lease):
                _count(db, "refused_results", 1)
                return None
            return self._end(db, lease.rollout, lease.attempt, outcome)

        status = await self._write(change)
        if status is None:
            raise LeaseLost(
                f"rollout {lease.rollout.id}, attempt {lease.attempt}: this result came too late "
                "and was refused"
            )
        return status

    def _end(self, db: Connection, rollout: Rollout, attempt: int, outcome: Outcome) -> Status:
        status = after(outcome, attempt, rollout.max_attempts)
        db.execute(
            update(t.attempts)
            .where(_attempt(rollout.id, attempt))
            .values(ended=time.time(), outcome=to_json(outcome))
        )
        db.execute(update(t.rollouts).where(t.rollouts.c.id == rollout.id).values(status=status))
        for callback in self._attempt_ended:
            callback(rollout.id, attempt)
        return status

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        def change(db: Connection) -> int:
            cancelled = 0
            for name in rollout_ids:
                row = db.execute(
                    select(t.rollouts.c.record, t.rollouts.c.attempt, t.rollouts.c.status).where(
                        t.rollouts.c.id == name
                    )
                ).one_or_none()
                if row is None or row.status in FINISHED:
                    continue
                outcome = Outcome(failure="cancelled", error="cancelled")
                self._end(db, from_json(Rollout, row.record), row.attempt, outcome)
                cancelled += 1
            return cancelled

        return await self._write(change)

    async def wait_finished(
        self, rollout_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> list[str]:
        async def look() -> list[str]:
            return await self._read(lambda db: existing(db, rollout_ids, FINISHED))

        return await self._bell.until(look, timeout_s)

    async def results(self, rollout_ids: Sequence[str]) -> list[RolloutResult]:
        return await self._read(lambda db: read_results(db, rollout_ids))

    async def add_rewards(self, rewards: Sequence[Reward]) -> None:
        def change(db: Connection) -> None:
            for reward in rewards:
                row = reward_row(reward)
                keys = ["rollout_id", "attempt", "name", "source", "target"]
                update_to = {"value": row["value"], "record": row["record"]}
                statement = insert(t.rewards).values(row)
                db.execute(statement.on_conflict_do_update(index_elements=keys, set_=update_to))

        await self._write(change)

    async def commit_step(self, step: StepRecord) -> None:
        def change(db: Connection) -> None:
            if db.execute(select(t.steps.c.step).where(t.steps.c.step == step.step)).first():
                raise StoreError(f"step {step.step} is committed already")
            taken = db.execute(
                select(t.consumed.c.rollout_id, t.consumed.c.step)
                .where(t.consumed.c.rollout_id.in_(step.consumed))
                .limit(1)
            ).first()
            if taken:
                raise StoreError(
                    f"step {step.step} would consume rollout {taken.rollout_id}, "
                    f"which step {taken.step} has consumed"
                )
            db.execute(insert(t.steps).values(step=step.step, record=to_json(step)))
            if step.consumed:
                rows = [{"rollout_id": name, "step": step.step} for name in step.consumed]
                db.execute(insert(t.consumed), rows)

        await self._write(change)

    async def steps(self) -> list[StepRecord]:
        def look(db: Connection) -> list[StepRecord]:
            found = db.execute(select(t.steps.c.record).order_by(t.steps.c.step)).scalars()
            return [from_json(StepRecord, record) for record in found]

        return await self._read(look)

    async def discard_after(self, step: int) -> int:
        def change(db: Connection) -> int:
            gone = db.execute(delete(t.rollouts).where(t.rollouts.c.step > step)).rowcount
            db.execute(delete(t.consumed).where(t.consumed.c.step > step))
            db.execute(delete(t.steps).where(t.steps.c.step > step))
            return gone

        return await self._write(change)

    async def counts(self) -> dict[str, int]:
        def look(db: Connection) -> dict[str, int]:
            status = t.rollouts.c.status
            found = db.execute(select(status, func.count()).group_by(status)).all()
            counted = db.execute(select(t.counters.c.name, t.counters.c.value)).all()
            return {row[0]: row[1] for row in (*found, *counted)}

        return await self._read(look)

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.close)
        self._engine.dispose()

    async def _write(self, change: Callable[[Connection], R]) -> R:
        return await asyncio.wrap_future(self._writer.submit(change))

    async def _read(self, look: Callable[[Connection], R]) -> R:
        def run() -> R:
            with self._engine.connect() as db:
                return look(db)

        return await asyncio.to_thread(run)


def _anything_queued(db: Connection) -> bool:
    found = select(t.rollouts.c.position).where(t.rollouts.c.status == "queued").limit(1)
    return db.execute(found).first() is not None


def _attempt(rollout_id: str, number: int) -> ColumnElement[bool]:
    return (t.attempts.c.rollout_id == rollout_id) & (t.attempts.c.number == number)


def _is_current(db: Connection, lease: Lease) -> bool:
    return _attempt_is_current(db, lease.rollout.id, lease.attempt)


def _attempt_is_current(db: Connection, rollout_id: str, attempt: int) -> bool:
    r = t.rollouts.c
    found = select(r.id).where(r.id == rollout_id, r.attempt == attempt, r.status == "running")
    return db.execute(found).first() is not None


def _count(db: Connection, name: str, by: int) -> None:
    statement = insert(t.counters).values(name=name, value=by)
    grown = {"value": t.counters.c.value + by}
    db.execute(statement.on_conflict_do_update(index_elements=["name"], set_=grown))
