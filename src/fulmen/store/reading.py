"""Reading rollouts back, many at once."""

from collections.abc import Collection, Iterator, Sequence

from sqlalchemy import Connection, select

from fulmen.schema.codec import from_json
from fulmen.schema.records import Call, Outcome, Reward, Rollout, RolloutResult
from fulmen.store import tables as t
from fulmen.store.base import FINISHED, Status
from fulmen.store.rows import call_of

_MOST_IN_ONE_QUERY = 500
"""Databases bound the number of parameters of a statement."""


def existing(
    db: Connection, ids: Sequence[str], statuses: Collection[Status] | None = None
) -> list[str]:
    """Those of the ids that exist (with one of the statuses), in the order given."""
    found: set[str] = set()
    for part in _parts(ids):
        query = select(t.rollouts.c.id).where(t.rollouts.c.id.in_(part))
        if statuses is not None:
            query = query.where(t.rollouts.c.status.in_(statuses))
        found.update(db.execute(query).scalars())
    return [name for name in ids if name in found]


def read_results(db: Connection, ids: Sequence[str]) -> list[RolloutResult]:
    """The finished ones of these rollouts with all that their last attempt left."""
    results: dict[str, RolloutResult] = {}
    for part in _parts(ids):
        calls = _calls(db, part)
        rewards = _rewards(db, part)
        r, a = t.rollouts.c, t.attempts.c
        query = (
            select(r.id, r.attempt, r.status, r.record, a.outcome)
            .join_from(
                t.rollouts,
                t.attempts,
                (a.rollout_id == r.id) & (a.number == r.attempt),
                isouter=True,
            )
            .where(r.id.in_(part), r.status.in_(FINISHED))
        )
        for row in db.execute(query):
            key = (row.id, row.attempt)
            # A rollout cancelled before any attempt has no outcome of its own.
            outcome = (
                from_json(Outcome, row.outcome) if row.outcome else Outcome(failure="cancelled")
            )
            results[row.id] = RolloutResult(
                rollout=from_json(Rollout, row.record),
                attempt=row.attempt,
                outcome=outcome,
                calls=tuple(calls.get(key, ())),
                rewards=tuple(rewards.get(key, ())),
            )
    return [results[name] for name in ids if name in results]


def _calls(db: Connection, ids: Sequence[str]) -> dict[tuple[str, int], list[Call]]:
    c = t.calls.c
    query = select(t.calls).where(c.rollout_id.in_(ids)).order_by(c.position, c.choice)
    found: dict[tuple[str, int], list[Call]] = {}
    for row in db.execute(query).mappings():
        found.setdefault((row["rollout_id"], row["attempt"]), []).append(call_of(row))
    return found


def _rewards(db: Connection, ids: Sequence[str]) -> dict[tuple[str, int], list[Reward]]:
    query = select(t.rewards).where(t.rewards.c.rollout_id.in_(ids))
    found: dict[tuple[str, int], list[Reward]] = {}
    for row in db.execute(query).mappings():
        reward = from_json(Reward, row["record"])
        found.setdefault((reward.rollout_id, reward.attempt), []).append(reward)
    return found


def _parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _MOST_IN_ONE_QUERY):
        yield ids[start : start + _MOST_IN_ONE_QUERY]
