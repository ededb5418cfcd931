"""How attempts end, and what becomes of their rollouts, as functions of a connection.

They run in the writer's transaction, as those of `fulmen.store.changes` do.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

from sqlalchemy import Connection, Double, bindparam, literal, or_, select, update

from fulmen.schema.records import FailureKind, Lease, Outcome, Retry
from fulmen.store import rows, tables
from fulmen.store.base import FINISHED, Status
from fulmen.store.changes import count
from fulmen.store.database import Change, soonest
from fulmen.store.leasing import ATTEMPT
from fulmen.store.lifecycle import OPEN, is_current, next_of
from fulmen.store.reads import CANCELLED, State, retries, states

_LEASE_OVER = Outcome(failure="infrastructure", error="the worker's lease expired")
_TOO_LONG = Outcome(failure="timeout", error="the deadline was over, and the worker told no end")

_SET_STATUS = (
    update(tables.rollouts)
    .where(tables.rollouts.c.id == bindparam("of"))
    .values(
        status=bindparam("to"),
        lease_expires=None,
        deadline=None,
        not_before=tables.now() + bindparam("pause", type_=Double),  # null stays null
    )
)
_END_ATTEMPT = (
    update(tables.attempts).where(ATTEMPT).values(ended=tables.now(), outcome=bindparam("text"))
)


class Refused(NamedTuple):
    """Why a result cannot be taken. No exception: that it was refused is counted, and kept."""

    why: str


class _Ending(NamedTuple):
    """How the attempt of a rollout ended."""

    of: State
    failure: FailureKind | None
    text: str
    """The outcome as JSON."""


def finish(
    connection: Connection, lease: Lease, failure: FailureKind | None, outcome: str
) -> Change[Status | Refused]:
    """End an attempt with an outcome (JSON text); one that ended so before gets the same answer."""
    row = states(connection, [lease.rollout.id], hold=True).get(lease.rollout.id)
    if row and is_current(row.status, latest=row.attempt, attempt=lease.attempt):
        ended = _end(connection, [_Ending(row, failure, outcome)])
        return Change(
            ended.value[0],
            queued=ended.queued,
            due_s=ended.due_s,
            finished=ended.finished,
            ended=ended.ended,
        )
    a = tables.attempts.c
    query = select(a.worker, a.outcome).where(
        a.rollout_id == lease.rollout.id, a.attempt == lease.attempt
    )
    before = connection.execute(query).one_or_none()
    if row and before and (before.worker, before.outcome) == (lease.worker, outcome):
        begun = lease.attempt - row.attempts_before
        return Change(next_of(failure, begun=begun, retry=lease.rollout.retry).status)
    count(connection, "refused_results", 1)
    return Change(Refused(_why(row, lease.attempt)))


def _why(row: State | None, attempt: int) -> str:
    """Why an attempt may not tell its end."""
    if row is None or attempt <= row.attempts_before:
        return "the rollout was discarded"
    if attempt < row.attempt:
        return f"attempt {row.attempt} has begun"
    if row.status == "cancelled":
        return "the rollout was cancelled"
    return f"it had ended in another way, and the rollout is {row.status}"


def cancel(connection: Connection, rollout_ids: Iterable[str]) -> Change[int]:
    """End those that are not finished; returns how many."""
    wanted = [
        row for row in states(connection, rollout_ids, hold=True).values() if row.status in OPEN
    ]
    text = rows.to_text(CANCELLED, "the cancellation")
    ended = _end(connection, [_Ending(row, CANCELLED.failure, text) for row in wanted])
    return Change(len(wanted), finished=ended.finished, ended=ended.ended)


def expire(connection: Connection, now: float | None = None) -> Change[list[str]]:
    """End the attempts whose lease or whose deadline is over; returns the ids of their rollouts.

    `now`: Unix time, for the database's own.
    """
    c, at = tables.rollouts.c, tables.now() if now is None else literal(now, Double)
    lost = c.lease_expires < at
    query = select(c.id, lost.label("lost"))
    query = query.where(c.status == "running", or_(lost, c.deadline < at))
    query = query.order_by(c.position).with_for_update(key_share=True)
    over = {row.id: _LEASE_OVER if row.lost else _TOO_LONG for row in connection.execute(query)}
    found = states(connection, over)
    ended = _end(
        connection,
        [
            _Ending(found[name], outcome.failure, rows.to_text(outcome, "the end"))
            for name, outcome in over.items()
        ],
    )
    return Change(
        list(over),
        queued=ended.queued,
        due_s=ended.due_s,
        finished=ended.finished,
        ended=ended.ended,
    )


def _end(connection: Connection, endings: Sequence[_Ending]) -> Change[list[Status]]:
    """Move rollouts to their next status, and close the attempts of those that run.

    The value is the status of each.
    """
    if not endings:
        return Change([])
    failed = [x.of.id for x in endings if x.failure not in (None, "cancelled")]
    retry = retries(connection, failed)
    moved, following = [], []
    for row, failure, text in endings:
        begun = row.attempt - row.attempts_before
        coming = next_of(failure, begun=begun, retry=retry.get(row.id, Retry()))
        following.append(coming)
        pause = coming.pause_s or None
        moved.append(_of(row) | {"to": coming.status, "pause": pause, "text": text})
    connection.execute(_SET_STATUS, moved)
    running = [row.status == "running" for row, _, _ in endings]
    if closed := list(compress(moved, running)):
        connection.execute(_END_ATTEMPT, closed)
    rests = [coming.pause_s for coming in following if coming.status == "queued"]
    return Change(
        [coming.status for coming in following],
        queued=rests.count(0.0),
        due_s=soonest(pause for pause in rests if pause),
        finished=tuple(move["of"] for move in moved if move["to"] in FINISHED),
        ended=tuple((move["of"], move["number"]) for move in compress(moved, running)),
    )


def _of(row: State) -> dict[str, Any]:
    return {"of": row.id, "number": row.attempt}
