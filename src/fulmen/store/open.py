"""Open the store of a run, making it if it is not there."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, insert, inspect, select
from sqlalchemy.exc import DBAPIError

from fulmen.schema.errors import StoreError
from fulmen.schema.place import is_url
from fulmen.store import tables
from fulmen.store.database import Database
from fulmen.store.sql import SqlStore
from fulmen.store.sqlite import SqliteDatabase

T = TypeVar("T")


def open_store(
    where: Path | str,
    *,
    secret: bytes | None = None,
    new: bool | None = None,
    patience_s: float | None = None,
) -> SqlStore:
    """Open or create a store; one of an older format is migrated.

    Args:
        where: a file for SQLite (its folder must exist; it is readable by its owner only),
            ":memory:" for a store that ends with the process, or the URL of a PostgreSQL database:
            `postgresql://user@host/database?schema=name`.
        secret: signs the rollout keys; None: one that is made once and kept in the store.
        new: True: there must be no rollout yet; False: the store must be there; None: either way.
        patience_s: how long a lost PostgreSQL server is waited for; None: a minute.

    Raises:
        StoreError: it is no store, is of another version, cannot be reached, or cannot be written.
    """
    database = open_database(str(where), patience_s)
    try:
        secret = _explained(database, lambda: _prepare(database, secret, new))
        return _explained(database, lambda: SqlStore(database, secret))
    except BaseException:
        database.close()
        raise


def open_database(where: str, patience_s: float | None = None) -> Database:
    """The database of a place, to which nothing is connected yet; raises StoreError if it cannot
    be one."""
    if not is_url(where):
        return SqliteDatabase(where)
    try:
        from fulmen.store.postgres import PATIENCE_S, PostgresDatabase
    except ImportError as error:
        if not (error.name or "psycopg").startswith("psycopg"):
            raise
        raise StoreError(
            "a store in PostgreSQL needs psycopg", hint='pip install "fulmen[postgres]"'
        ) from error
    return PostgresDatabase(where, patience_s=PATIENCE_S if patience_s is None else patience_s)


def _explained(database: Database, work: Callable[[], T]) -> T:
    try:
        return work()
    except DBAPIError as error:
        raise database.explain(error) from error


def _prepare(database: Database, secret: bytes | None, new: bool | None) -> bytes:
    """Make the tables of a new store, or check and migrate those of an old one; returns the secret.

    One transaction: it is done wholly or not at all, by one process of several.
    """
    with database.preparing(new is not False) as connection:
        present = set(inspect(connection).get_table_names())
        if not present:
            if new is False:
                raise StoreError(
                    f"{database.where}: there is no store",
                    hint="give the place that the run began with",
                )
            make_tables(connection)
        elif tables.meta.name not in present:
            raise StoreError(
                f"{database.where}: it is not a Fulmen store",
                hint="give the path of a run.db, or the URL of an empty schema",
            )
        meta = _meta(connection)
        _bring_up_to_date(database, connection, int(meta.get("format", b"0")))
        if new and connection.scalar(select(tables.rollouts.c.id).limit(1)) is not None:
            raise StoreError(
                f"{database.where}: it holds a run already",
                hint="leave the schema out for a new one, or resume that run's folder",
            )
        if secret is None:
            secret = meta.get("secret")
        if secret is None:
            secret = secrets.token_bytes(32)
            connection.execute(insert(tables.meta), {"name": "secret", "value": secret})
        database.enroll(connection)
    return secret


def make_tables(connection: Connection) -> None:
    """Make all tables at once, which is what the migrations lead to one by one (tested)."""
    tables.metadata.create_all(connection)
    tables.revision.create(connection)
    head = tables.revision_of(tables.FORMAT)
    connection.execute(insert(tables.revision), {"version_num": head})
    connection.execute(
        insert(tables.meta), {"name": "format", "value": str(tables.FORMAT).encode()}
    )
    zeros = [{"name": name, "value": 0} for name in tables.COUNTERS]
    connection.execute(insert(tables.counters), zeros)


def _meta(connection: Connection) -> dict[str, bytes]:
    query = select(tables.meta.c.name, tables.meta.c.value)
    return {row.name: row.value for row in connection.execute(query)}


def _bring_up_to_date(database: Database, connection: Connection, found: int) -> None:
    if found == tables.FORMAT:
        return
    if tables.OLDEST <= found < tables.FORMAT:
        from fulmen.store.migrate import migrate  # Alembic, which is seldom needed

        database.keep_copy(f"format-{found}")
        migrate(connection, found)
        return
    age, remedy = (
        ("a newer", "upgrade Fulmen")
        if found > tables.FORMAT
        else ("an older", "go on with the version that began the run")
    )
    raise StoreError(
        f"{database.where}: written by {age} Fulmen "
        f"(store format {found}, this one reads {tables.FORMAT})",
        hint=f"{remedy}, or start a new run",
    )
