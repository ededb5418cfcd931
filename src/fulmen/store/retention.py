"""Retention: the bulk of old rollouts goes, their record stays.

What a model and its agent said (calls) and what was seen of it (spans) is nearly all of a store's
bytes, and of no use once a step has learned from it. Rollouts, attempts, outcomes, rewards, steps
and what each consumed stay: so statistics hold, and no rollout is learned from twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, exists, func, or_, select

from fulmen.schema.records import Rollout, Split
from fulmen.store import rows, tables
from fulmen.store.base import FINISHED
from fulmen.store.database import Change
from fulmen.store.reads import parts

_AT_ONCE = 500
"""Rollouts emptied in one transaction: others get their turn in between."""
_BULK = (tables.calls, tables.spans)


class Emptied(NamedTuple):
    """What one go has done."""

    rollouts: int
    """That have lost their calls and spans."""
    behind: int | None
    """Place in the queue to go on behind; None: there is no more."""


class Bulk(NamedTuple):
    """Numbers of rows."""

    calls: int = 0
    spans: int = 0

    def plus(self, other: "Bulk") -> "Bulk":
        """Both together."""
        return Bulk(self.calls + other.calls, self.spans + other.spans)


def empty(connection: Connection, split: Split, step: int, behind: int) -> Change[Emptied]:
    """Delete calls and spans of the next rollouts of a step that nobody needs any more."""
    found, end = _needless(connection, split, step, behind)
    for part in parts(found):
        for table in _BULK:
            connection.execute(delete(table).where(table.c.rollout_id.in_(part)))
    return Change(Emptied(len(found), end))


def bulk_of(connection: Connection, split: Split, step: int) -> Bulk:
    """What `empty` would delete of a step, all goes together."""
    end: int | None = -1
    total = Bulk()
    while end is not None:
        found, end = _needless(connection, split, step, end)
        for part in parts(found):
            total = total.plus(_counted(connection, part))
    return total


def bulk(connection: Connection) -> Bulk:
    """All calls and spans that are there."""
    return _counted(connection, None)


def _counted(connection: Connection, ids: Sequence[str] | None) -> Bulk:
    """Rows of these rollouts; None: of all."""
    counts = (select(func.count(table.c.rollout_id)) for table in _BULK)
    if ids is not None:
        counts = (
            query.where(table.c.rollout_id.in_(ids))
            for query, table in zip(counts, _BULK, strict=True)
        )
    return Bulk(*(connection.scalar(query) or 0 for query in counts))


def _needless(
    connection: Connection, split: Split, step: int, behind: int
) -> tuple[list[str], int | None]:
    """Ids of a step's next finished rollouts that have calls or spans, and where to go on.

    Of training, those that some step has consumed; of evaluations, all.
    """
    r, taken = tables.rollouts.c, tables.consumed.c.rollout_id
    has = or_(*(exists().where(table.c.rollout_id == r.id) for table in _BULK))
    used = exists().where(taken == r.id)
    query = (
        select(r.position, r.id, r.record)
        .where(r.step == step, r.position > behind, r.status.in_(sorted(FINISHED)), has)
        .where(used if split == "train" else ~used)
        .order_by(r.position)
        .limit(_AT_ONCE)
    )
    found = connection.execute(query).all()
    ids = [
        row.id
        for row in found
        if split == "train" or rows.from_text(Rollout, row.record).split == split
    ]
    return ids, found[-1].position if len(found) == _AT_ONCE else None
