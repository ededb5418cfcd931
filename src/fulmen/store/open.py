"""Open the store of a run, making it if it is not there."""

import secrets
import sqlite3
from pathlib import Path

from sqlalchemy import Connection, create_engine, event, insert, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from fulmen.schema.errors import StoreError
from fulmen.store import tables as t
from fulmen.store.rows import pack_value, unpack_value
from fulmen.store.sqlite import SqliteStore
from fulmen.store.writer import as_store_error


def open_store(path: Path | str) -> SqliteStore:
    """Open or create a SQLite store.

    Raises:
        StoreError: the file is no store, is of another version, or cannot be written.
    """
    engine = create_engine(f"sqlite:///{path}", poolclass=QueuePool, max_overflow=20)
    event.listen(engine, "connect", _configure)
    event.listen(engine, "begin", _begin)
    try:
        with engine.begin() as db:
            t.metadata.create_all(db)
            secret = _check(db, Path(path))
    except SQLAlchemyError as error:
        engine.dispose()
        cause = getattr(error, "orig", None)
        if isinstance(cause, sqlite3.DatabaseError) and "not a database" in str(cause):
            raise StoreError(f"{path} is not a store of Fulmen") from None
        raise as_store_error(error, engine) from error
    except StoreError:
        engine.dispose()
        raise
    return SqliteStore(engine, secret)


def _check(db: Connection, path: Path) -> bytes:
    """Compare versions; returns the secret, made at the first opening."""
    found = {row.name: unpack_value(row.value) for row in db.execute(select(t.meta))}
    if not found:
        found = {"schema_version": t.SCHEMA_VERSION, "secret": secrets.token_bytes(32)}
        rows = [{"name": name, "value": pack_value(value)} for name, value in found.items()]
        db.execute(insert(t.meta), rows)
    version = found["schema_version"]
    if version != t.SCHEMA_VERSION:
        age = "a newer" if version > t.SCHEMA_VERSION else "an older"
        raise StoreError(
            f"{path} was written by {age} version of Fulmen (schema {version}, this one reads "
            f"{t.SCHEMA_VERSION})",
            hint="use that version to go on with this run, or start a new run",
        )
    return found["secret"]


def _configure(connection: sqlite3.Connection, _: object) -> None:
    # SQLAlchemy begins transactions itself (below); sqlite3's own way breaks savepoints.
    connection.isolation_level = None
    for pragma in (
        "journal_mode=WAL",
        # A commit survives the end of the process; only a power cut may lose the last ones.
        "synchronous=NORMAL",
        "foreign_keys=ON",
        "busy_timeout=30000",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")
