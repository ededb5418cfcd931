"""Claims and leases, as functions of a connection.

They run in the writer's transaction, as those of `fulmen.store.changes` do.
"""

import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, delete, insert, select, update

from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import Lease, Rollout
from fulmen.store import rows, tables
from fulmen.store.database import Change
from fulmen.store.lifecycle import is_current
from fulmen.store.reads import states

_KEY_MARGIN_S = 60.0
"""A rollout key outlives the deadline of its attempt by this: what stops the agent has its own
delays, and an agent must not see a refused key before it is stopped."""

_OLDEST = (
    select(tables.rollouts.c.attempt, tables.rollouts.c.record)
    .where(tables.rollouts.c.status == "queued")
    .order_by(tables.rollouts.c.position)
    .limit(bindparam("most"))
)
_NEXT = _OLDEST.with_for_update(key_share=True, skip_locked=True)
_NEXT_HELD = _OLDEST.with_for_update(key_share=True)
_ATTEMPTS = insert(tables.attempts)

# Statements that run once per rollout of a list.
ATTEMPT = and_(
    tables.attempts.c.rollout_id == bindparam("of"),
    tables.attempts.c.attempt == bindparam("number"),
)
_BEGIN = (
    update(tables.rollouts)
    .where(tables.rollouts.c.id == bindparam("of"))
    .values(status="running", attempt=bindparam("number"), lease_expires=bindparam("until"))
)
SET_STATUS = (
    update(tables.rollouts)
    .where(tables.rollouts.c.id == bindparam("of"))
    .values(status=bindparam("to"), lease_expires=None)
)


class Claim(NamedTuple):
    """What a worker asks for."""

    worker: str
    limit: int
    lease_s: float


def take(
    connection: Connection, claims: Sequence[Claim], *, secret: bytes
) -> list[Change[list[Lease]]]:
    """Begin an attempt of each of the oldest queued rollouts; who asked first is served first."""
    limit = sum(claim.limit for claim in claims)
    found = connection.execute(_NEXT, {"most": limit}).all()
    if len(found) < len(claims):
        # What others hold just now may stay in the queue after all, and nobody would tell.
        found = connection.execute(_NEXT_HELD, {"most": limit}).all()
    left, now = iter(found), time.time()
    taken = [
        [
            _lease(row.record, row.attempt + 1, claim, now, secret)
            for row in islice(left, claim.limit)
        ]
        for claim in claims
    ]
    leases = [lease for part in taken for lease in part]
    if leases:
        connection.execute(_BEGIN, [_of(lease) | {"until": lease.expires} for lease in leases])
        begun = [
            {"rollout_id": x.rollout.id, "attempt": x.attempt, "worker": x.worker, "started": now}
            for x in leases
        ]
        connection.execute(_ATTEMPTS, begun)
    return [Change(part) for part in taken]


def _lease(text: str, attempt: int, claim: Claim, now: float, secret: bytes) -> Lease:
    rollout = rows.from_text(Rollout, text)
    return Lease(
        rollout=rollout,
        attempt=attempt,
        worker=claim.worker,
        key=_key(rollout, attempt, now, secret),
        expires=now + claim.lease_s,
    )


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
    gone = lost(connection, leases)
    held = [lease for lease in leases if lease not in gone]
    if held:
        connection.execute(delete(tables.attempts).where(ATTEMPT), [_of(x) for x in held])
        connection.execute(SET_STATUS, [_of(lease) | {"to": "queued"} for lease in held])
        earlier = update(tables.rollouts).values(attempt=tables.rollouts.c.attempt - 1)
        of = tables.rollouts.c.id == bindparam("of")
        connection.execute(earlier.where(of), [_of(lease) for lease in held])
    return Change(None, queued=len(held))


def renew(connection: Connection, leases: Sequence[Lease], lease_s: float) -> Change[list[Lease]]:
    """Give leases more time; returns those that are no longer current."""
    gone = lost(connection, leases)
    held = [{"of": x.rollout.id, "until": time.time() + lease_s} for x in leases if x not in gone]
    if held:
        longer = update(tables.rollouts).values(lease_expires=bindparam("until"))
        connection.execute(longer.where(tables.rollouts.c.id == bindparam("of")), held)
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
