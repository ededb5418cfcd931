"""Format 3: the first that can be migrated."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = None


def upgrade() -> None:
    """Make all tables."""
    _queue()
    _record()
    _steps()
    meta = op.create_table(
        "meta",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.bulk_insert(meta, [{"name": "format", "value": b"3"}])
    counters = op.create_table(
        "counters",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    names = ("refused_calls", "refused_spans", "refused_results")
    op.bulk_insert(counters, [{"name": name, "value": 0} for name in names])


def _queue() -> None:
    op.create_table(
        "rollouts",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("attempts_before", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("lease_expires", sa.Double),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_index("ix_rollouts_step", "rollouts", ["step"])
    op.create_index("rollouts_by_status", "rollouts", ["status", "position"])
    op.create_table(
        "discarded",
        sa.Column("rollout_id", sa.String, primary_key=True),
        sa.Column("attempt", sa.Integer, nullable=False),
    )
    op.create_table(
        "attempts",
        sa.Column(
            "rollout_id",
            sa.String,
            sa.ForeignKey("rollouts.id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("worker", sa.String, nullable=False),
        sa.Column("started", sa.Double, nullable=False),
        sa.Column("ended", sa.Double),
        sa.Column("outcome", sa.Text),
    )


def _of_attempt() -> tuple[sa.Column[str], sa.Column[int], sa.ForeignKeyConstraint]:
    return (
        sa.Column("rollout_id", sa.String, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.ForeignKeyConstraint(
            ["rollout_id", "attempt"],
            ["attempts.rollout_id", "attempts.attempt"],
            ondelete="CASCADE",
        ),
    )


def _record() -> None:
    op.create_table(
        "calls",
        *_of_attempt(),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("choice", sa.Integer, primary_key=True),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("parent", sa.String),
        sa.Column("protocol", sa.String, nullable=False),
        sa.Column("agent", sa.String, nullable=False),
        sa.Column("span_id", sa.String),
        sa.Column("policy", sa.String, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary, nullable=False),
        sa.Column("completion_ids", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.Column("grammar", sa.Text, nullable=False),
        sa.Column("versions", sa.Text, nullable=False),
        sa.Column("temperature", sa.Double, nullable=False),
        sa.Column("top_p", sa.Double, nullable=False),
        sa.Column("finish_reason", sa.String, nullable=False),
        sa.Column("superseded", sa.Boolean, nullable=False),
        sa.Column("drift", sa.Text),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("response", sa.Text, nullable=False),
        sa.Column("started", sa.Double, nullable=False),
        sa.Column("ended", sa.Double, nullable=False),
    )
    op.create_table(
        "spans",
        *_of_attempt(),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "rewards",
        *_of_attempt(),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("source", sa.String, primary_key=True),
        sa.Column("call_id", sa.String, primary_key=True),
        sa.Column("span_id", sa.String, primary_key=True),
        sa.Column("agent", sa.String, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
    )


def _steps() -> None:
    op.create_table(
        "steps",
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "consumed",
        sa.Column("rollout_id", sa.String, sa.ForeignKey("rollouts.id"), primary_key=True),
        sa.Column("step", sa.Integer, sa.ForeignKey("steps.step"), nullable=False),
    )
    op.create_index("ix_consumed_step", "consumed", ["step"])
