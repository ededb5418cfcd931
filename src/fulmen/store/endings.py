"""How attempts end, and what becomes of their rollouts, as functions of a connection.

They run in the writer's transaction, as those of `fulmen.store.changes` do.
"""

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, and_, bindparam, select, update

from fulmen.schema.records import FailureKind, Lease, Outcome
from fulmen.store import rows, tables
from fulmen.store.base import FINISHED, Status
from fulmen.store.changes import count
from fulmen.store.database import Change
from fulmen.store.leasing import ATTEMPT, SET_STATUS, lost
from fulmen.store.lifecycle import OPEN, status_after
from fulmen.store.reads import CANCELLED, State, states

_LEASE_OVER = Outcome(failure="infrastructure", error="the worker's lease expired")

_END_ATTEMPT = (
    update(tables.attempts).where(ATTEMPT).values(ended=bindparam("at"), outcome=bindparam("text"))
)


def finish(
    connection: Connection, lease: Lease, failure: FailureKind | None, outcome: str
) -> Change[Status | None]:
    """End an attempt with an outcome (JSON text); returns None, and counts, if it is not current.

    Refusing is no exception here: the count must be kept.
    """
    if lost(connection, [lease]):
        count(connection, "refused_results", 1)
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


def expire(connection: Connection, now: float) -> Change[list[str]]:
    """End the attempts whose lease is over; returns the ids of their rollouts."""
    c = tables.rollouts.c
    over = and_(c.status == "running", c.lease_expires < now)
    query = select(c.id).where(over).order_by(c.position)
    ids = list(connection.scalars(query.with_for_update(key_share=True)))
    found = states(connection, ids)
    ended = _end(connection, [(found[name], _LEASE_OVER.failure) for name in ids], _LEASE_OVER)
    return Change(ids, queued=ended.queued, finished=ended.finished, ended=ended.ended)


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
    connection.execute(SET_STATUS, moved)
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
