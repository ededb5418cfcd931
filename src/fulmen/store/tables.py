"""The tables: one schema for every database that can hold a store.

Only portable types. What is looked up has a column; everything else of a record is one JSON text
(`fulmen.store.rows`). Token ids and log-probabilities are packed arrays, four bytes a number.
Times are Unix time in seconds, and those of the queue by the database's own clock (`now`).
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

FORMAT = 5
"""Version of this schema, kept in `meta`. An older store is migrated (`fulmen.store.migrations`,
whose revisions are named by these numbers), a newer one is not opened."""
OLDEST = 3
"""The first version that can be migrated."""

metadata = MetaData()


class now(FunctionElement[float]):
    """Unix time, seconds, by the clock that all processes of the store share, once a statement."""

    type = Double()
    inherit_cache = True


@compiles(now, "postgresql")
def _postgresql_now(*_: object, **__: object) -> str:
    return "CAST(extract(epoch FROM statement_timestamp()) AS double precision)"


@compiles(now, "sqlite")
def _sqlite_now(*_: object, **__: object) -> str:
    return "(SELECT fulmen_now())"  # a query of its own runs once, not once a row


# SQLite gives out increasing numbers by itself only for the exact type INTEGER.
_position = BigInteger().with_variant(Integer, "sqlite")

meta = Table(
    "meta",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

rollouts = Table(
    "rollouts",
    metadata,
    # The place in the queue. A retried rollout keeps it: its group is waiting for it.
    Column("position", _position, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("step", Integer, nullable=False, index=True),
    Column("status", String, nullable=False),
    Column("attempt", Integer, nullable=False),  # the last one begun
    Column("attempts_before", Integer, nullable=False),  # begun before the rollout was discarded
    Column("lease_expires", Double),  # null unless running
    Column("record", Text, nullable=False),
    Column("deadline", Double),  # of the running attempt, with some grace; null unless running
    Column("not_before", Double),  # when a retried rollout may be claimed; null: now
    # What the claim asks of rollouts that rest is in the index, too.
    Index("rollouts_by_status", "status", "position", "not_before"),
)

discarded = Table(
    # The highest attempt of every rollout that was deleted, so that its number is never given
    # again: a worker that outlived a crash cannot write into the repeated rollout.
    "discarded",
    metadata,
    Column("rollout_id", String, primary_key=True),
    Column("attempt", Integer, nullable=False),
)


def _rollout_id() -> Column[str]:
    reference = ForeignKey("rollouts.id", ondelete="CASCADE")
    return Column("rollout_id", String, reference, primary_key=True)


def _of_attempt() -> tuple[Column[str], Column[int], ForeignKeyConstraint]:
    return (
        Column("rollout_id", String, primary_key=True),
        Column("attempt", Integer, primary_key=True),
        ForeignKeyConstraint(
            ["rollout_id", "attempt"],
            ["attempts.rollout_id", "attempts.attempt"],
            ondelete="CASCADE",
        ),
    )


attempts = Table(
    "attempts",
    metadata,
    _rollout_id(),
    Column("attempt", Integer, primary_key=True),
    Column("worker", String, nullable=False),
    Column("started", Double, nullable=False),
    Column("ended", Double),  # null while running
    Column("outcome", Text),
)

calls = Table(
    "calls",
    metadata,
    *_of_attempt(),
    Column("id", String, primary_key=True),
    Column("choice", Integer, primary_key=True),
    Column("index", Integer, nullable=False),
    Column("parent", String),
    Column("protocol", String, nullable=False),
    Column("agent", String, nullable=False),
    Column("span_id", String),
    Column("policy", String, nullable=False),
    Column("status", Integer, nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("completion_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("grammar", Text, nullable=False),
    Column("versions", Text, nullable=False),
    Column("temperature", Double, nullable=False),
    Column("top_p", Double, nullable=False),
    Column("finish_reason", String, nullable=False),
    Column("superseded", Boolean, nullable=False),
    Column("drift", Text),
    Column("request", Text, nullable=False),
    Column("response", Text, nullable=False),
    Column("started", Double, nullable=False),
    Column("ended", Double, nullable=False),
)

spans = Table(
    "spans",
    metadata,
    *_of_attempt(),
    Column("id", String, primary_key=True),
    Column("record", Text, nullable=False),
)

rewards = Table(
    "rewards",
    metadata,
    *_of_attempt(),
    Column("name", String, primary_key=True),
    Column("source", String, primary_key=True),
    # '' stands for None: a null would be unequal to itself, and the reward be kept twice.
    Column("call_id", String, primary_key=True),
    Column("span_id", String, primary_key=True),
    Column("agent", String, primary_key=True),
    Column("value", Double, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("record", Text, nullable=False),
)

consumed = Table(
    # The primary key is the promise: a rollout belongs to one step at most.
    "consumed",
    metadata,
    Column("rollout_id", String, ForeignKey("rollouts.id"), primary_key=True),
    Column("step", Integer, ForeignKey("steps.step"), nullable=False, index=True),
)

counters = Table(
    "counters",
    metadata,
    Column("name", String, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
writers = Table(
    # How many batches each process has committed, where the answer to a commit can be lost.
    "writers",
    metadata,
    Column("name", String, primary_key=True),
    Column("batch", BigInteger, nullable=False),
)

revision = Table(
    # Alembic's own, which is no part of the schema: which migration the tables are at.
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)

COUNTERS = ("refused_calls", "refused_spans", "refused_results")


def revision_of(form: int) -> str:
    """Alembic's name of the migration that leads to a format.

    >>> revision_of(5)
    '0005'
    """
    return f"{form:04}"
