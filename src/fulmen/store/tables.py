"""The tables, declared once for every database.

Portable types only: text, numbers, binary. Records that are always read and written whole are kept
as one JSON document beside the columns that are searched; token arrays are little-endian binary.
"""

from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

SCHEMA_VERSION = 1
"""Raised with every change of the tables; a store of another version is refused."""

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
"""`schema_version`, and `secret`: what rollout keys are signed with."""

rollouts = Table(
    "rollouts",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=True),
    Column("id", String(128), nullable=False, unique=True),
    Column("step", Integer, nullable=False),
    Column("split", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("record", LargeBinary, nullable=False),
)
"""One row a rollout; `position` is the order of the queue, `record` the Rollout as JSON."""
Index("rollouts_by_status", rollouts.c.status, rollouts.c.position)
Index("rollouts_by_step", rollouts.c.step)

attempts = Table(
    "attempts",
    metadata,
    Column(
        "rollout_id", String(128), ForeignKey(rollouts.c.id, ondelete="CASCADE"), primary_key=True
    ),
    Column("number", Integer, primary_key=True),
    Column("worker", String(128), nullable=False),
    Column("started", Float, nullable=False),
    Column("expires", Float, nullable=False),
    Column("ended", Float),
    Column("outcome", LargeBinary),
)
"""`outcome` is the Outcome as JSON; null while the attempt runs."""

calls = Table(
    "calls",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("rollout_id", String(128), ForeignKey(rollouts.c.id, ondelete="CASCADE")),
    Column("attempt", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    Column("choice", Integer, nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("completion_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("record", LargeBinary, nullable=False),
)
"""`record` is the Call as JSON without its token arrays."""
Index("calls_by_attempt", calls.c.rollout_id, calls.c.attempt)

spans = Table(
    "spans",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("rollout_id", String(128), ForeignKey(rollouts.c.id, ondelete="CASCADE")),
    Column("attempt", Integer, nullable=False),
    Column("record", LargeBinary, nullable=False),
)
Index("spans_by_attempt", spans.c.rollout_id, spans.c.attempt)

rewards = Table(
    "rewards",
    metadata,
    Column("rollout_id", String(128), ForeignKey(rollouts.c.id, ondelete="CASCADE")),
    Column("attempt", Integer, nullable=False),
    Column("name", String(128), nullable=False),
    Column("source", String(16), nullable=False),
    Column("target", String(256), nullable=False),
    Column("value", Float, nullable=False),
    Column("record", LargeBinary, nullable=False),
)
"""`target` is the call or span that the reward is for; empty for the rollout itself."""
Index(
    "rewards_by_target",
    rewards.c.rollout_id,
    rewards.c.attempt,
    rewards.c.name,
    rewards.c.source,
    rewards.c.target,
    unique=True,
)

steps = Table(
    "steps",
    metadata,
    Column("step", Integer, primary_key=True),
    Column("record", LargeBinary, nullable=False),
)

consumed = Table(
    "consumed",
    metadata,
    Column("rollout_id", String(128), primary_key=True),
    Column("step", Integer, nullable=False),
)
"""A rollout is consumed by at most one step: the primary key says so."""
Index("consumed_by_step", consumed.c.step)

counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Integer, nullable=False),
)
"""What was refused, and how often."""
