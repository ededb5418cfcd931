"""Claims and leases, as functions of a connection.

They run in the writer's transaction, as those of `fulmen.store.changes` do.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, or_, select, update

from fulmen.schema.clock import steady_time
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import LONGEST_PAUSE_S, Lease, Rollout
from fulmen.store import rows, tables
from fulmen.store.database import Change
from fulmen.store.lifecycle import DEADLINE_GRACE_S, is_current
from fulmen.store.reads import parts, states

_KEY_MARGIN_S = 60.0
"""A rollout key outlives the deadline of its attempt by this: what stops the agent has its own
delays, and an agent must not see a refused key before it is stopped."""

# Statements that run once per rollout of a list.
ATTEMPT = and_(
    tables.attempts.c.rollout_id == bindparam("of"),
    tables.attempts.c.attempt == bindparam("number"),
)
_OF = tables.rollouts.c.id == bindparam("of")
_BEGIN = (
    update(tables.rollouts)
    .where(_OF)
    .values(
        status="running",
        attempt=bindparam("number"),
        lease_expires=bindparam("until"),
        deadline=bindparam("at_most"),
        not_before=None,
    )
)
_RENEW = update(tables.rollouts).where(_OF).values(lease_expires=tables.now() + bindparam("longer"))
_GIVE_BACK = (
    update(tables.rollouts)
    .where(_OF)
    .values(
        status="queued",
        attempt=tables.rollouts.c.attempt - 1,
        lease_expires=None,
        deadline=None,
    )
)
_NEW = insert(tables.attempts).values(
    rollout_id=bindparam("of"),
    attempt=bindparam("number"),
    worker=bindparam("by"),
    started=bindparam("at"),
)
_OLDEST = (
    select(tables.rollouts.c.attempt, tables.rollouts.c.record, tables.now().label("now"))
    .where(
        tables.rollouts.c.status == "queued",
        or_(
            tables.rollouts.c.not_before.is_(None),
            tables.rollouts.c.not_before <= tables.now(),
            # Further away than any rest can be: the clock was set back, and they are due.
            tables.rollouts.c.not_before > tables.now() + LONGEST_PAUSE_S,
        ),
    )
    .order_by(tables.rollouts.c.position)
    .limit(bindparam("most"))
)
_NEXT = _OLDEST.with_for_update(key_share=True, skip_locked=True)
_NEXT_HELD = _OLDEST.with_for_update(key_share=True)


class Claim(NamedTuple):
    """What is asked for at once: for these workers, each with the most that it takes."""

    workers: Sequence[tuple[str, int]]
    lease_s: float

    def places(self) -> Iterator[str]:
        """A worker's name for each rollout that it takes."""
        return (worker for worker, limit in self.workers for _ in range(limit))


def take(
    connection: Connection, claims: Sequence[Claim], *, secret: bytes
) -> list[Change[list[Lease]]]:
    """Begin an attempt of each of the oldest queued rollouts that do not rest.

    Who asked first is served first.
    """
    most = sum(limit for claim in claims for _, limit in claim.workers)
    found = connection.execute(_NEXT, {"most": most}).all()
    before_last = sum(limit for claim in claims[:-1] for _, limit in claim.workers)
    if len(found) <= before_last:  # the last one would go away with nothing
        # What others hold just now may stay in the queue after all, and nobody would tell.
        found = connection.execute(_NEXT_HELD, {"most": most}).all()
    left = iter(found)
    taken = [
        [
            (row.now, _lease(row.record, row.attempt + 1, worker, row.now + claim.lease_s, secret))
            for worker, row in zip(claim.places(), left, strict=False)
        ]
        for claim in claims
    ]
    _begin(connection, [begun for part in taken for begun in part])
    due_s = None if all(taken) else _first_due(connection)
    return [Change([lease for _, lease in part], due_s=None if part else due_s) for part in taken]


def _lease(text: str, attempt: int, worker: str, expires: float, secret: bytes) -> Lease:
    rollout = rows.from_text(Rollout, text)
    return Lease(
        rollout=rollout,
        attempt=attempt,
        worker=worker,
        key=_key(rollout, attempt, secret),
        expires=expires,
    )


def _begin(connection: Connection, begun: Sequence[tuple[float, Lease]]) -> None:
    """Write down attempts that begin at these times."""
    moves = [
        _of(lease)
        | {
            "by": lease.worker,
            "at": now,
            "until": lease.expires,
            "at_most": now + lease.rollout.deadline_s + DEADLINE_GRACE_S,
        }
        for now, lease in begun
    ]
    if moves:
        connection.execute(_BEGIN, moves)
        connection.execute(_NEW, moves)


def _first_due(connection: Connection) -> float | None:
    """Seconds until the first of the queued rollouts has rested; None: there are none."""
    c = tables.rollouts.c
    left = select(func.min(c.not_before) - tables.now()).where(c.status == "queued")
    due = connection.scalar(left)
    return None if due is None else min(max(due, 0.0), LONGEST_PAUSE_S)


def _key(rollout: Rollout, attempt: int, secret: bytes) -> str:
    claims = KeyClaims(
        rollout_id=rollout.id,
        attempt=attempt,
        expires=steady_time() + rollout.deadline_s + _KEY_MARGIN_S,
        seed=rollout.seed,
        sampling=rollout.sampling,
        trained=rollout.split == "train",
    )
    return mint_key(claims, secret)


def give_back(connection: Connection, leases: Sequence[Lease]) -> Change[None]:
    """Undo `take`, for leases that nobody has seen; it costs the rollouts no attempt.

    Told again, it changes nothing: the number of an attempt that was given back is given out again,
    but the end of a lease that nobody has seen, and nobody has renewed, is its own.
    """
    gone = lost(connection, leases)
    ends = _ends(connection, [lease.rollout.id for lease in leases if lease not in gone])
    held = [
        lease for lease in leases if (lease.worker, lease.expires) == ends.get(lease.rollout.id)
    ]
    if held:
        connection.execute(delete(tables.attempts).where(ATTEMPT), [_of(x) for x in held])
        connection.execute(_GIVE_BACK, [_of(lease) for lease in held])
    return Change(None, queued=len(held))


def _ends(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, tuple[str, float]]:
    """By rollout: the worker of its latest attempt, and when the lease is over."""
    r, a = tables.rollouts.c, tables.attempts.c
    latest = and_(a.rollout_id == r.id, a.attempt == r.attempt)
    query = select(r.id, a.worker, r.lease_expires).join_from(
        tables.rollouts, tables.attempts, latest
    )
    return {
        row.id: (row.worker, row.lease_expires)
        for part in parts(rollout_ids)
        for row in connection.execute(query.where(r.id.in_(part)))
    }


def renew(connection: Connection, leases: Sequence[Lease], lease_s: float) -> Change[list[Lease]]:
    """Give leases more time; returns those that are no longer current."""
    gone = lost(connection, leases)
    held = [{"of": x.rollout.id, "longer": lease_s} for x in leases if x not in gone]
    if held:
        connection.execute(_RENEW, held)
    return Change(gone)


def lost(connection: Connection, leases: Sequence[Lease]) -> list[Lease]:
    """Those whose attempt may no longer write."""
    found = states(connection, (lease.rollout.id for lease in leases), hold=True)
    return [
        lease
        for lease in leases
        if (row := found.get(lease.rollout.id)) is None
        or not is_current(row.status, latest=row.attempt, attempt=lease.attempt)
    ]


def _of(lease: Lease) -> dict[str, Any]:
    return {"of": lease.rollout.id, "number": lease.attempt}
