"""What each writing method of the store does to its tables, as functions of a connection.

Portable SQL only, so that any database can hold a store. They run in the writer's transaction, one
after another, and hold the rollouts that they decide on (in SQLite only one process writes anyway):
nothing changes between what one of them reads and what it writes.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs
from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from fulmen.schema.errors import LeaseLost, StoreError
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import FailureKind, Lease, Outcome, Reward, Rollout, StepRecord
from fulmen.store import rows, tables
from fulmen.store.base import FINISHED, Status
from fulmen.store.database import Change
from fulmen.store.lifecycle import OPEN, is_current, status_after
from fulmen.store.reads import CANCELLED, State, parts, states

_KEY_MARGIN_S = 60.0
"""A rollout key outlives the deadline of its attempt by this: what stops the agent has its own
delays, and an agent must not see a refused key before it is stopped."""

_LEASE_OVER = Outcome(failure="infrastructure", error="the worker's lease expired")

# Statements that run once per rollout of a list.
_ATTEMPT = and_(
    tables.attempts.c.rollout_id == bindparam("of"),
    tables.attempts.c.attempt == bindparam("number"),
)
_BEGIN = (
    update(tables.rollouts)
    .where(tables.rollouts.c.id == bindparam("of"))
    .values(status="running", attempt=bindparam("number"), lease_expires=bindparam("until"))
)
_SET_STATUS = (
    update(tables.rollouts)
    .where(tables.rollouts.c.id == bindparam("of"))
    .values(status=bindparam("to"), lease_expires=None)
)
_END_ATTEMPT = (
    update(tables.attempts).where(_ATTEMPT).values(ended=bindparam("at"), outcome=bindparam("text"))
)


def enqueue(connection: Connection, new: Mapping[str, rows.Row]) -> Change[int]:
    """Add rollouts, by id, that are not known yet; returns how many those are."""
    known = states(connection, new)
    wanted = [row for name, row in new.items() if name not in known]
    d = tables.discarded.c
    before: dict[str, int] = {}
    for part in parts([str(row["id"]) for row in wanted]):
        for row in connection.execute(select(tables.discarded).where(d.rollout_id.in_(part))):
            before[row.rollout_id] = row.attempt
    for row in wanted:
        begun = before.get(str(row["id"]), 0)
        row |= {"status": "queued", "attempt": begun, "attempts_before": begun}
    added = _insert_new(connection, tables.rollouts, wanted)
    return Change(added, queued=added)


def take(
    connection: Connection, workers: Sequence[tuple[str, int]], lease_s: float, secret: bytes
) -> Change[list[Lease]]:
    """Begin an attempt of each of the oldest queued rollouts, for workers that take so many."""
    c, now = tables.rollouts.c, time.time()
    query = select(c.attempt, c.record).where(c.status == "queued").order_by(c.position)
    query = query.limit(sum(limit for _, limit in workers))
    found = connection.execute(query.with_for_update(key_share=True, skip_locked=True)).all()
    if not found:
        # What others hold just now may stay in the queue after all, and nobody would tell.
        found = connection.execute(query.with_for_update(key_share=True)).all()
    leases = []
    places = (worker for worker, limit in workers for _ in range(limit))
    for (latest, text), worker in zip(found, places, strict=False):
        rollout, attempt = rows.from_text(Rollout, text), latest + 1
        lease = Lease(
            rollout=rollout,
            attempt=attempt,
            worker=worker,
            key=_key(rollout, attempt, now, secret),
            expires=now + lease_s,
        )
        leases.append(lease)
    if leases:
        connection.execute(_BEGIN, [_of(lease) | {"until": lease.expires} for lease in leases])
        begun = [
            {"rollout_id": x.rollout.id, "attempt": x.attempt, "worker": x.worker, "started": now}
            for x in leases
        ]
        connection.execute(insert(tables.attempts), begun)
    return Change(leases)


def _key(rollout: Rollout, attempt: int, now: float, secret: bytes) -> str:
    claims = KeyClaims(
        rollout_id=rollout.id,
        attempt=attempt,
        expires=now + rollout.deadline_s + _KEY_MARGIN_S,
        seed=rollout.seed,
        sampling=rollout.sampling,
        trained=rollout.split == "train",
    )
    return mint_key(claims, secret)


def give_back(connection: Connection, leases: Sequence[Lease]) -> Change[None]:
    """Undo `take`, for leases that nobody has seen; it costs the rollouts no attempt."""
    lost = _lost(connection, leases)
    held = [lease for lease in leases if lease not in lost]
    if held:
        connection.execute(delete(tables.attempts).where(_ATTEMPT), [_of(x) for x in held])
        connection.execute(_SET_STATUS, [_of(lease) | {"to": "queued"} for lease in held])
        earlier = update(tables.rollouts).values(attempt=tables.rollouts.c.attempt - 1)
        of = tables.rollouts.c.id == bindparam("of")
        connection.execute(earlier.where(of), [_of(lease) for lease in held])
    return Change(None, queued=len(held))


def renew(connection: Connection, leases: Sequence[Lease], lease_s: float) -> Change[list[Lease]]:
    """Give leases more time; returns those that are no longer current."""
    lost = _lost(connection, leases)
    held = [{"of": x.rollout.id, "until": time.time() + lease_s} for x in leases if x not in lost]
    if held:
        longer = update(tables.rollouts).values(lease_expires=bindparam("until"))
        connection.execute(longer.where(tables.rollouts.c.id == bindparam("of")), held)
    return Change(lost)


def expire(connection: Connection, now: float) -> Change[list[str]]:
    """End the attempts whose lease is over; returns the ids of their rollouts."""
    c = tables.rollouts.c
    over = and_(c.status == "running", c.lease_expires < now)
    query = select(c.id).where(over).order_by(c.position)
    ids = list(connection.scalars(query.with_for_update(key_share=True)))
    found = states(connection, ids)
    ended = _end(connection, [(found[name], _LEASE_OVER.failure) for name in ids], _LEASE_OVER)
    return Change(ids, queued=ended.queued, finished=ended.finished, ended=ended.ended)


def finish(
    connection: Connection, lease: Lease, failure: FailureKind | None, outcome: str
) -> Change[Status | None]:
    """End an attempt with an outcome (JSON text); returns None, and counts, if it is not current.

    Refusing is no exception here: the count must be kept.
    """
    if _lost(connection, [lease]):
        _count(connection, "refused_results", 1)
        return Change(None)
    row = states(connection, [lease.rollout.id])[lease.rollout.id]
    return _end(connection, [(row, failure)], outcome)


def cancel(connection: Connection, rollout_ids: Iterable[str]) -> Change[int]:
    """End those that are not finished; returns how many."""
    wanted = [
        row for row in states(connection, rollout_ids, hold=True).values() if row.status in OPEN
    ]
    ended = _end(connection, [(row, CANCELLED.failure) for row in wanted], CANCELLED)
    return Change(len(wanted), finished=ended.finished, ended=ended.ended)


def _end(
    connection: Connection,
    endings: Sequence[tuple[State, FailureKind | None]],
    outcome: Outcome | str,
) -> Change[Status | None]:
    """Move rollouts to their next status, and close the attempts of those that run.

    The value is the status of the last one; None if there are none.
    """
    text = outcome if isinstance(outcome, str) else rows.to_text(outcome, "the outcome")
    now, moved = time.time(), []
    for row, failure in endings:
        begun = row.attempt - row.attempts_before
        status = status_after(failure, begun=begun, max_attempts=row.max_attempts)
        moved.append({"of": row.id, "number": row.attempt, "to": status, "at": now, "text": text})
    if not moved:
        return Change(None)
    connection.execute(_SET_STATUS, moved)
    ended = tuple((row.id, row.attempt) for row, _ in endings if row.status == "running")
    closed = [move for move in moved if (move["of"], move["number"]) in ended]
    if closed:
        connection.execute(_END_ATTEMPT, closed)
    return Change(
        moved[-1]["to"],
        queued=sum(move["to"] == "queued" for move in moved),
        finished=tuple(move["of"] for move in moved if move["to"] in FINISHED),
        ended=ended,
    )


def keep(
    connection: Connection, new: Sequence[rows.Row], *, table: Table, counter: str
) -> Change[None]:
    """Keep calls or spans of current attempts; those of others are counted."""
    found = states(connection, (str(row["rollout_id"]) for row in new), hold=True)
    running = {(name, row.attempt) for name, row in found.items() if row.status == "running"}
    kept = [row for row in new if (row["rollout_id"], row["attempt"]) in running]
    _replace(connection, table, kept)
    if len(kept) < len(new):
        _count(connection, counter, len(new) - len(kept))
    return Change(None)


def supersede(
    connection: Connection, rollout_id: str, attempt: int, call_ids: Sequence[str]
) -> Change[None]:
    """Mark calls that the agent did not receive; those of other attempts are left as they are."""
    c = tables.calls.c
    for part in parts(call_ids):
        which = and_(c.rollout_id == rollout_id, c.attempt == attempt, c.id.in_(part))
        connection.execute(update(tables.calls).where(which).values(superseded=True))
    return Change(None)


def add_rewards(connection: Connection, rewards: Sequence[Reward]) -> Change[None]:
    """Keep rewards of latest attempts, finished or not.

    Raises:
        StoreError: there is no such attempt; nothing is written.
        LeaseLost: another attempt has begun; nothing is written.
    """
    found = states(connection, (reward.rollout_id for reward in rewards), hold=True)
    for reward in rewards:
        row = found.get(reward.rollout_id)
        whose = f"rollout {reward.rollout_id}, attempt {reward.attempt}"
        if row is None or not row.attempts_before < reward.attempt <= row.attempt:
            raise StoreError(f"{whose}: a reward for an attempt that never began")
        if reward.attempt < row.attempt:
            raise LeaseLost(f"{whose}: a reward came after attempt {row.attempt} had begun")
    _replace(connection, tables.rewards, [rows.reward_row(reward) for reward in rewards])
    return Change(None)


def commit_step(connection: Connection, step: StepRecord, text: str) -> Change[None]:
    """Record a step and what it consumed.

    Raises:
        StoreError: the step exists, or a rollout is not there to be consumed; nothing is written.
    """
    c = tables.consumed.c
    same = select(tables.steps.c.step).where(tables.steps.c.step == step.step)
    if connection.scalar(same) is not None:
        raise StoreError(f"step {step.step} was committed before")
    if len(set(step.consumed)) < len(step.consumed):
        raise StoreError(f"step {step.step} consumes a rollout twice")
    found = states(connection, step.consumed, hold=True)
    for name in step.consumed:
        if name not in found or found[name].status not in FINISHED:
            what = found[name].status if name in found else "not in the store"
            raise StoreError(f"step {step.step} consumes rollout {name}, which is {what}")
    for part in parts(step.consumed):
        query = select(c.rollout_id, c.step).where(c.rollout_id.in_(part)).limit(1)
        for name, earlier in connection.execute(query):
            raise StoreError(f"step {step.step}: rollout {name} was consumed by step {earlier}")
    connection.execute(insert(tables.steps), {"step": step.step, "record": text})
    if step.consumed:
        taken = [{"rollout_id": name, "step": step.step} for name in step.consumed]
        connection.execute(insert(tables.consumed), taken)
    return Change(None)


def add_checkpoint(connection: Connection, step: int, folder: str) -> Change[None]:
    """Note where the weights of a committed step are. Raises StoreError if it was not committed."""
    c = tables.steps.c
    text = connection.scalar(select(c.record).where(c.step == step).with_for_update())
    if text is None:
        raise StoreError(f"step {step} was never committed")
    record = structs.replace(rows.from_text(StepRecord, text), checkpoint=folder)
    changed = update(tables.steps).where(c.step == step)
    connection.execute(changed.values(record=rows.to_text(record, f"step {step}")))
    return Change(None)


def discard_after(connection: Connection, step: int) -> Change[int]:
    """Forget later steps and their rollouts, but never an attempt number that was given out."""
    r, c = tables.rollouts.c, tables.consumed.c
    connection.execute(delete(tables.consumed).where(c.step > step))
    connection.execute(delete(tables.steps).where(tables.steps.c.step > step))
    # A rollout asked ahead of time may have been consumed by a step that stays.
    kept = select(c.rollout_id)
    gone = and_(r.step > step, r.id.not_in(kept))
    query = select(r.id, r.attempt, r.status).where(gone).order_by(r.id)
    found = connection.execute(query.with_for_update()).all()
    fences: list[rows.Row] = [
        {"rollout_id": row.id, "attempt": row.attempt} for row in found if row.attempt
    ]
    _replace(connection, tables.discarded, fences)
    connection.execute(delete(tables.rollouts).where(gone))
    ended = tuple((row.id, row.attempt) for row in found if row.status == "running")
    return Change(len(found), ended=ended)


def _of(lease: Lease) -> dict[str, Any]:
    return {"of": lease.rollout.id, "number": lease.attempt}


def _lost(connection: Connection, leases: Sequence[Lease]) -> list[Lease]:
    """Those whose attempt may no longer write."""
    found = states(connection, (lease.rollout.id for lease in leases), hold=True)
    return [
        lease
        for lease in leases
        if (row := found.get(lease.rollout.id)) is None
        or not is_current(row.status, latest=row.attempt, attempt=lease.attempt)
    ]


def _insert_new(connection: Connection, table: Table, new: Sequence[rows.Row]) -> int:
    """Insert rows, but those that another process brought first; returns how many."""
    if not new:
        return 0
    way = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = way(table).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    return connection.execute(statement, list(new)).rowcount


def _replace(connection: Connection, table: Table, new: Sequence[rows.Row]) -> None:
    """Insert rows; one with the same primary key as an older one takes its place."""
    keys = [column.name for column in table.primary_key]
    # The last of equals wins, as if they had come one by one.
    latest = {tuple(row[key] for key in keys): row for row in new}
    if not latest:
        return
    same: list[ColumnElement[bool]] = [table.c[key] == bindparam(f"old_{key}") for key in keys]
    olds = [{f"old_{key}": row[key] for key in keys} for row in latest.values()]
    connection.execute(delete(table).where(*same), olds)
    connection.execute(insert(table), list(latest.values()))


def _count(connection: Connection, name: str, by: int) -> None:
    c = tables.counters.c
    connection.execute(update(tables.counters).where(c.name == name).values(value=c.value + by))
