"""Bring an older store's tables to today's format, by the steps in `fulmen.store.migrations`."""

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, inspect

from fulmen.store import tables


def migrate(connection: Connection, found: int | None, to: str = "head") -> None:
    """Take the steps from format `found` (None: nothing is there), in the connection's transaction.

    They end at revision `to`, or at today's format.
    A store that was made before there were migrations is taken for what its format says.
    """
    config = Config()
    config.set_main_option("script_location", "fulmen.store:migrations")
    config.attributes["connection"] = connection
    if found is not None and not inspect(connection).has_table(tables.revision.name):
        command.stamp(config, tables.revision_of(found))
    command.upgrade(config, to)
