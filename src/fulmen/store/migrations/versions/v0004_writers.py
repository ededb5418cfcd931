"""Format 4: how many batches each process has committed."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the table, and note the format."""
    op.create_table(
        "writers",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("batch", sa.BigInteger, nullable=False),
    )
    meta = sa.table("meta", sa.column("name", sa.String), sa.column("value", sa.LargeBinary))
    op.execute(meta.update().where(meta.c.name == "format").values(value=b"4"))
