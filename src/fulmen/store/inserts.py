"""Inserting many rows where some may be there already, in any of the databases."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, Table, bindparam, delete, insert
from sqlalchemy.dialects import postgresql, sqlite

from fulmen.store import rows


def insert_new(connection: Connection, table: Table, new: Sequence[rows.Row]) -> int:
    """Insert rows, but those that another process brought first; returns how many."""
    if not new:
        return 0
    way = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = way(table).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    return connection.execute(statement, list(new)).rowcount


def replace(connection: Connection, table: Table, new: Sequence[rows.Row]) -> None:
    """Insert rows; one with the same primary key as an older one takes its place."""
    keys = [column.name for column in table.primary_key]
    # The last of equals wins, as if they had come one by one.
    latest = {tuple(row[key] for key in keys): row for row in new}
    if not latest:
        return
    same: list[ColumnElement[bool]] = [table.c[key] == bindparam(f"old_{key}") for key in keys]
    olds = [{f"old_{key}": row[key] for key in keys} for row in latest.values()]
    connection.execute(delete(table).where(*same), olds)
    connection.execute(insert(table), list(latest.values()))
