"""How attempts end, and what becomes of their rollouts, as functions of a connection.

They run in the writer's transaction, as those of `fulmen.store.changes` do.
"""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, and_, bindparam, select, update

from fulmen.schema.records import FailureKind, Lease, Outcome
from fulmen.store import rows, tables
from fulmen.store.base import FINISHED, Status
from fulmen.store.changes import count
from fulmen.store.database import Change
from fulmen.store.leasing import ATTEMPT, SET_STATUS
from fulmen.store.lifecycle import OPEN, is_current, status_after
from fulmen.store.reads import CANCELLED, State, states

_LEASE_OVER = Outcome(failure="infrastructure", error="the worker's lease expired")

_END_ATTEMPT = (
    update(tables.attempts).where(ATTEMPT).values(ended=bindparam("at"), outcome=bindparam("text"))
)


class Ending(NamedTuple):
    """An attempt that came to its end."""

    lease: Lease
    failure: FailureKind | None
    outcome: str
    """As JSON text."""


def finish(connection: Connection, endings: Sequence[Ending]) -> list[Change[Status | None]]:
    """End attempts; a value of None, and a count, for one that is not current.

    Refusing is no exception here: the count must be kept.
    """
    found = states(connection, (x.lease.rollout.id for x in endings), hold=True)
    moves: list[_Move | None] = []
    for lease, failure, text in endings:
        row = found.get(lease.rollout.id)
        current = row and is_current(row.status, latest=row.attempt, attempt=lease.attempt)
        # Whoever says the same twice is told that it is over.
        moves.append(_move(found.pop(row.id), failure, text) if row and current else None)
    refused = moves.count(None)
    if refused:
        count(connection, "refused_results", refused)
    _write(connection, [move for move in moves if move])
    return [move.change() if move else Change(None) for move in moves]


def cancel(connection: Connection, rollout_ids: Iterable[str]) -> Change[int]:
    """End those that are not finished; returns how many."""
    wanted = [
        row for row in states(connection, rollout_ids, hold=True).values() if row.status in OPEN
    ]
    changes = _all_end(connection, wanted, CANCELLED)
    return Change(len(wanted), finished=changes.finished, ended=changes.ended)


def expire(connection: Connection, now: float) -> Change[list[str]]:
    """End the attempts whose lease is over; returns the ids of their rollouts."""
    c = tables.rollouts.c
    over = and_(c.status == "running", c.lease_expires < now)
    query = select(c.id).where(over).order_by(c.position)
    ids = list(connection.scalars(query.with_for_update(key_share=True)))
    found = states(connection, ids)
    changes = _all_end(connection, [found[name] for name in ids], _LEASE_OVER)
    return Change(ids, queued=changes.queued, finished=changes.finished, ended=changes.ended)


def _all_end(connection: Connection, rows_: Sequence[State], outcome: Outcome) -> Change[None]:
    """All these end in the same way."""
    text = rows.to_text(outcome, "the outcome")
    moves = [_move(row, outcome.failure, text) for row in rows_]
    _write(connection, moves)
    changes = [move.change() for move in moves]
    return Change(
        None,
        queued=sum(change.queued for change in changes),
        finished=tuple(name for change in changes for name in change.finished),
        ended=tuple(end for change in changes for end in change.ended),
    )


class _Move(NamedTuple):
    """A rollout on its way to its next status."""

    row: State
    to: Status
    outcome: str

    def change(self) -> Change[Status | None]:
        name, running = self.row.id, self.row.status == "running"
        return Change(
            self.to,
            queued=int(self.to == "queued"),
            finished=(name,) if self.to in FINISHED else (),
            ended=((name, self.row.attempt),) if running else (),
        )


def _move(row: State, failure: FailureKind | None, outcome: str) -> _Move:
    begun = row.attempt - row.attempts_before
    return _Move(row, status_after(failure, begun=begun, max_attempts=row.max_attempts), outcome)


def _write(connection: Connection, moves: Sequence[_Move]) -> None:
    """Give rollouts their next status, and close the attempts of those that run."""
    now = time.time()
    if moves:
        connection.execute(SET_STATUS, [{"of": move.row.id, "to": move.to} for move in moves])
    closed = [
        {"of": row.id, "number": row.attempt, "at": now, "text": text}
        for row, _, text in moves
        if row.status == "running"
    ]
    if closed:
        connection.execute(_END_ATTEMPT, closed)
