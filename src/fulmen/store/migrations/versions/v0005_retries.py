"""Format 5: rollouts say themselves which failures are followed by another attempt, and rest."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_PART = 1000
"""Rollouts that are in memory at once."""

_rollouts = sa.table(
    "rollouts",
    sa.column("position", sa.BigInteger),
    sa.column("record", sa.Text),
)


def upgrade() -> None:
    """Move `max_attempts` into the records, add what the queue needs, and note the format."""
    _rewrite(op.get_bind())
    op.drop_index("rollouts_by_status", "rollouts")
    op.drop_column("rollouts", "max_attempts")
    op.add_column("rollouts", sa.Column("deadline", sa.Double))
    op.add_column("rollouts", sa.Column("not_before", sa.Double))
    op.create_index("rollouts_by_status", "rollouts", ["status", "position", "not_before"])
    meta = sa.table("meta", sa.column("name", sa.String), sa.column("value", sa.LargeBinary))
    op.execute(meta.update().where(meta.c.name == "format").values(value=b"5"))


def _rewrite(connection: sa.Connection) -> None:
    c, last = _rollouts.c, -1
    changed = _rollouts.update().where(c.position == sa.bindparam("at"))
    changed = changed.values(record=sa.bindparam("text"))
    query = sa.select(c.position, c.record).order_by(c.position).limit(_PART)
    while found := connection.execute(query.where(c.position > last)).all():
        last = found[-1].position
        new = [{"at": row.position, "text": _with_retry(row.record)} for row in found]
        connection.execute(changed, new)


def _with_retry(text: str) -> str:
    """A rollout's record in the new form.

    >>> _with_retry('{"id":"r","max_attempts":2}')
    '{"id":"r","retry":{"attempts":2}}'
    """
    record = json.loads(text)
    attempts = record.pop("max_attempts", None)
    if attempts is not None:
        record["retry"] = {"attempts": max(1, attempts)}
    return json.dumps(record, separators=(",", ":"))
