"""What the store reads back from its tables, as functions of a connection."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from sqlalchemy import Connection, Table, and_, bindparam, func, select

from fulmen.schema.records import (
    Call,
    Outcome,
    Retry,
    Reward,
    Rollout,
    RolloutResult,
    Span,
    StepRecord,
)
from fulmen.store import rows, tables
from fulmen.store.base import FINISHED, Status

T = TypeVar("T")

_PART = 500
"""Databases bound the number of parameters of a statement; long lists are asked in parts."""

CANCELLED = Outcome(failure="cancelled", error="the rollout was cancelled")

_STATUSES: tuple[Status, ...] = ("queued", "running", "succeeded", "failed", "cancelled")


class State(NamedTuple):
    """Where a rollout stands."""

    id: str
    status: Status
    attempt: int
    """The last one begun; 0: none yet."""
    attempts_before: int
    """Begun before the rollout was discarded and asked again; they do not count as tries."""


_STATES = select(*(tables.rollouts.c[name] for name in State._fields)).where(
    tables.rollouts.c.id.in_(bindparam("ids", expanding=True))
)
# In one order, so that two processes that want the same ones do not block each other.
_STATES_HELD = _STATES.order_by(tables.rollouts.c.id).with_for_update(key_share=True)


def parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """The items in order, as many at a time as one statement may name."""
    return (items[start : start + _PART] for start in range(0, len(items), _PART))


def states(
    connection: Connection, rollout_ids: Iterable[str], *, hold: bool = False
) -> dict[str, State]:
    """The states, by id, of those rollouts that exist.

    `hold`: they stay as they are until the transaction ends, whatever other processes want.
    """
    query = _STATES_HELD if hold else _STATES
    found: dict[str, State] = {}
    for part in parts(sorted(set(rollout_ids))):
        for row in connection.execute(query, {"ids": part}):
            found[row.id] = State._make(row)
    return found


def retries(connection: Connection, rollout_ids: Iterable[str]) -> dict[str, Retry]:
    """What these rollouts say about failures, by id."""
    c = tables.rollouts.c
    found: dict[str, Retry] = {}
    for part in parts(sorted(set(rollout_ids))):
        for row in connection.execute(select(c.id, c.record).where(c.id.in_(part))):
            found[row.id] = rows.from_text(Rollout, row.record).retry
    return found


def finished_of(connection: Connection, rollout_ids: Sequence[str]) -> list[str]:
    """The finished ones of these rollouts, in the order asked."""
    found = states(connection, rollout_ids)
    return [name for name in rollout_ids if name in found and found[name].status in FINISHED]


def results_of(connection: Connection, rollout_ids: Sequence[str]) -> list[RolloutResult]:
    """The finished ones of these rollouts, in the order asked, with what was recorded."""
    found: dict[str, RolloutResult] = {}
    for part in parts(rollout_ids):
        found |= _results(connection, part)
    return [found[name] for name in rollout_ids if name in found]


def _results(connection: Connection, ids: Collection[str]) -> dict[str, RolloutResult]:
    r, a = tables.rollouts.c, tables.attempts.c
    latest = and_(a.rollout_id == r.id, a.attempt == r.attempt)
    query = (
        select(r.id, r.status, r.attempt, r.record, a.outcome)
        .join_from(tables.rollouts, tables.attempts, latest, isouter=True)
        .where(r.id.in_(ids), r.status.in_(sorted(FINISHED)))
    )
    calls: dict[str, list[Call]] = defaultdict(list)
    for row in _of_latest(connection, tables.calls, ids):
        calls[row["rollout_id"]].append(rows.call_of(row))
    spans: dict[str, list[Span]] = defaultdict(list)
    for row in _of_latest(connection, tables.spans, ids):
        spans[row["rollout_id"]].append(rows.span_of(row))
    rewards: dict[str, list[Reward]] = defaultdict(list)
    for row in _of_latest(connection, tables.rewards, ids):
        rewards[row["rollout_id"]].append(rows.reward_of(row))
    return {
        row.id: RolloutResult(
            rollout=rows.from_text(Rollout, row.record),
            attempt=row.attempt,
            outcome=_outcome(row.status, row.outcome),
            calls=tuple(sorted(calls[row.id], key=lambda call: (call.index, call.choice))),
            spans=tuple(sorted(spans[row.id], key=lambda span: span.started)),
            rewards=tuple(rewards[row.id]),
        )
        for row in connection.execute(query)
    }


def _outcome(status: Status, text: str | None) -> Outcome:
    outcome = rows.from_text(Outcome, text) if text else CANCELLED
    # Cancelled while queued: its last attempt ended in another way, if there was one.
    return CANCELLED if status == "cancelled" != outcome.failure else outcome


def _of_latest(connection: Connection, table: Table, ids: Collection[str]) -> list[rows.Columns]:
    """The rows of each rollout's latest attempt, in a fixed order."""
    r = tables.rollouts.c
    latest = and_(table.c.rollout_id == r.id, table.c.attempt == r.attempt)
    query = select(table).join_from(table, tables.rollouts, latest).where(r.id.in_(ids))
    found = [dict(row) for row in connection.execute(query).mappings()]
    # Here, because databases order strings each in their own way.
    keys = [column.name for column in table.primary_key]
    return sorted(found, key=lambda row: [row[key] for key in keys])


def ended_lately(connection: Connection, seconds: float) -> list[tuple[str, int]]:
    """Rollout id and number of the attempts that ended at most so long ago."""
    c = tables.attempts.c
    query = select(c.rollout_id, c.attempt).where(c.ended >= tables.now() - seconds)
    query = query.order_by(c.ended)
    return [(row.rollout_id, row.attempt) for row in connection.execute(query)]


def steps(connection: Connection) -> list[StepRecord]:
    """All committed steps, first to last."""
    query = select(tables.steps.c.record).order_by(tables.steps.c.step)
    return [rows.from_text(StepRecord, text) for text in connection.scalars(query)]


def counts(connection: Connection) -> dict[str, int]:
    """Rollouts per status, and what was refused."""
    status = tables.rollouts.c.status
    found: dict[str, int] = dict.fromkeys((*_STATUSES, *tables.COUNTERS), 0)
    for name, number in connection.execute(select(status, func.count()).group_by(status)):
        found[name] = number
    for name, number in connection.execute(select(tables.counters)):
        found[name] = number
    return found
