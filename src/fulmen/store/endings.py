"""How attempts end, and what becomes of their rollouts, as functions of a connection.

They run in the writer's transaction, as those of `fulmen.store.changes` do.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import structs
from sqlalchemy import Connection, Double, bindparam, literal, or_, select, update

from fulmen.schema.records import FailureKind, Lease, Outcome, Retry
from fulmen.store import rows, tables
from fulmen.store.base import FINISHED, Status
from fulmen.store.changes import count
from fulmen.store.database import Change, soonest
from fulmen.store.leasing import ATTEMPT
from fulmen.store.lifecycle import OPEN, Next, is_current, next_of
from fulmen.store.reads import CANCELLED, State, retries, states

T = TypeVar("T")

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


class Result(NamedTuple):
    """What a worker tells of the end of its attempt."""

    lease: Lease
    failure: FailureKind | None
    text: str
    """The outcome as JSON."""


def finish(connection: Connection, results: Sequence[Result]) -> list[Change[Status | Refused]]:
    """End attempts; one that ended so before gets the same answer."""
    results = [_judged(connection, result) for result in results]
    found = states(connection, (result.lease.rollout.id for result in results), hold=True)
    endings: dict[int, _Ending] = {}
    for place, (lease, failure, text) in enumerate(results):
        row = found.get(lease.rollout.id)
        if row and is_current(row.status, latest=row.attempt, attempt=lease.attempt):
            endings[place] = _Ending(row, failure, text)
            del found[row.id]  # what comes of it is known once it is written
    ended = dict(zip(endings, _end(connection, list(endings.values())), strict=True))
    late = [result for place, result in enumerate(results) if place not in ended]
    found = states(connection, (result.lease.rollout.id for result in late))
    return [
        ended.get(place) or _late(connection, result, found.get(result.lease.rollout.id))
        for place, result in enumerate(results)
    ]


def _judged(connection: Connection, result: Result) -> Result:
    """The result, with the blame where it belongs: an agent that a model call failed under, with
    the status of a server's error, could not help it."""
    if result.failure != "agent":
        return result
    c, lease = tables.calls.c, result.lease
    failed = select(c.status).where(
        c.rollout_id == lease.rollout.id, c.attempt == lease.attempt, c.status >= 500
    )
    status = connection.scalar(failed.limit(1))
    if status is None:
        return result
    outcome = rows.from_text(Outcome, result.text)
    error = f"a model call ended with {status}, and then the agent: {outcome.error}"
    outcome = structs.replace(outcome, failure="infrastructure", error=error)
    return Result(lease, outcome.failure, rows.to_text(outcome, "the outcome"))


def _late(connection: Connection, result: Result, row: State | None) -> Change[Status | Refused]:
    """The answer to a result of an attempt that does not run."""
    lease, failure, text = result
    a = tables.attempts.c
    query = select(a.worker, a.outcome).where(
        a.rollout_id == lease.rollout.id, a.attempt == lease.attempt
    )
    before = connection.execute(query).one_or_none()
    if row and before and (before.worker, before.outcome) == (lease.worker, text):
        begun = lease.attempt - row.attempts_before
        retry = retries(connection, [row.id])[row.id]
        return Change(next_of(failure, begun=begun, retry=retry).status)
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
    return _as_one(len(wanted), ended)


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
    endings = [
        _Ending(found[name], outcome.failure, rows.to_text(outcome, "the end"))
        for name, outcome in over.items()
    ]
    return _as_one(list(over), _end(connection, endings))


def _as_one(value: T, changes: Sequence[Change[Any]]) -> Change[T]:
    return Change(
        value,
        queued=sum(change.queued for change in changes),
        due_s=soonest(change.due_s for change in changes),
        finished=tuple(name for change in changes for name in change.finished),
        ended=tuple(end for change in changes for end in change.ended),
    )


def _end(connection: Connection, endings: Sequence[_Ending]) -> list[Change[Status | Refused]]:
    """Move rollouts to their next status, and close the attempts of those that run."""
    failed = [x.of.id for x in endings if x.failure not in (None, "cancelled")]
    retry = retries(connection, failed)
    following = [
        next_of(
            failure,
            begun=row.attempt - row.attempts_before,
            retry=retry.get(row.id, Retry()),
        )
        for row, failure, _ in endings
    ]
    moved = [
        {"of": row.id, "to": coming.status, "pause": coming.pause_s or None}
        for (row, _, _), coming in zip(endings, following, strict=True)
    ]
    closed = [
        {"of": row.id, "number": row.attempt, "text": text}
        for row, _, text in endings
        if row.status == "running"
    ]
    if moved:
        connection.execute(_SET_STATUS, moved)
    if closed:
        connection.execute(_END_ATTEMPT, closed)
    return [_change(row, coming) for (row, _, _), coming in zip(endings, following, strict=True)]


def _change(row: State, coming: Next) -> Change[Status | Refused]:
    queued = coming.status == "queued"
    return Change(
        coming.status,
        queued=int(queued and not coming.pause_s),
        due_s=coming.pause_s if queued and coming.pause_s else None,
        finished=(row.id,) if coming.status in FINISHED else (),
        ended=((row.id, row.attempt),) if row.status == "running" else (),
    )
