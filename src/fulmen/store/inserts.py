"""Inserting many rows where some may be there already, in any of the databases."""

from collections.abc import Sequence
from functools import lru_cache

from sqlalchemy import Connection, Executable, Table
from sqlalchemy.dialects import postgresql, sqlite

from fulmen.store import rows


def insert_new(connection: Connection, table: Table, new: Sequence[rows.Row]) -> int:
    """Insert rows, but those that another process brought first; returns how many."""
    if not new:
        return 0
    return connection.execute(_insert_new(table, connection.dialect.name), list(new)).rowcount


def replace(connection: Connection, table: Table, new: Sequence[rows.Row]) -> None:
    """Insert rows; one with the same primary key as an older one takes its place."""
    keys = [column.name for column in table.primary_key]
    # The last of equals wins, as if they had come one by one.
    latest = {tuple(row[key] for key in keys): row for row in new}
    if latest:
        connection.execute(_replace(table, connection.dialect.name), list(latest.values()))


def _insert(table: Table, dialect: str) -> postgresql.Insert | sqlite.Insert:
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


@lru_cache
def _insert_new(table: Table, dialect: str) -> Executable:
    statement = _insert(table, dialect).on_conflict_do_nothing()
    return statement.execution_options(preserve_rowcount=True)


@lru_cache
def _replace(table: Table, dialect: str) -> Executable:
    statement = _insert(table, dialect)
    keys = list(table.primary_key)
    others = {c.name: statement.excluded[c.name] for c in table.c if c not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=others)
