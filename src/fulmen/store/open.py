"""Open the store of a run, making it if it is not there."""

import secrets
import sqlite3
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, insert, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool, StaticPool

from fulmen.schema.errors import StoreError
from fulmen.store import tables
from fulmen.store.sqlite import SqliteStore

MEMORY = ":memory:"

_BUSY_TIMEOUT_S = 30.0
"""How long to wait for another process that holds the file, a backup or a viewer."""

_CAUSES = {
    "SQLITE_FULL": ("no space left on device", "free some space and resume"),
    "SQLITE_IOERR": ("the disk did not read or write as asked", "check the disk, then resume"),
    "SQLITE_BUSY": ("another process is writing to it", "stop the other process"),
    "SQLITE_READONLY": ("it may not be written", "check the permissions of file and folder"),
    "SQLITE_CANTOPEN": ("it cannot be opened", "make its folder, and check the permissions"),
    "SQLITE_CORRUPT": ("its contents are damaged", "restore a copy, or start a new run"),
    "SQLITE_NOTADB": ("it is not a Fulmen store", "give the path of a run.db"),
}
"""By the beginning of SQLite's error name: what it means for the user, and what to do."""


def open_store(path: Path | str, *, secret: bytes | None = None) -> SqliteStore:
    """Open or create a SQLite store. Its folder must exist; the file is readable by its owner only.

    Args:
        path: the file, or ":memory:" for a store that ends with the process.
        secret: signs the rollout keys; None: one that is made once and kept in the file.

    Raises:
        StoreError: the file is no store, is of another version, or cannot be written.
    """
    where = str(path)
    try:
        if where != MEMORY:
            # It may hold the secret. SQLite gives its -wal and -shm files the same permissions.
            Path(path).touch(mode=0o600, exist_ok=True)
        writing = _engine(where, begin="BEGIN IMMEDIATE")
    except OSError as error:
        raise StoreError(
            f"{where}: {error.strerror}", hint="make the folder, and check its permissions"
        ) from error
    try:
        with writing.begin() as connection:
            secret = _prepare(connection, where, secret)
    except BaseException as error:
        writing.dispose()
        if isinstance(error, DBAPIError):
            raise explain(error, where) from error
        raise
    reading = None if where == MEMORY else _engine(where, begin="BEGIN")
    return SqliteStore(writing, reading, secret, explain=lambda error: explain(error, where))


def explain(error: DBAPIError, where: str) -> StoreError:
    """A database error in the words of the user: which file, what happened, what to do."""
    name = getattr(error.orig, "sqlite_errorname", "")
    for beginning, (cause, hint) in _CAUSES.items():
        if name.startswith(beginning):
            return StoreError(f"{where}: {cause}", hint=hint)
    return StoreError(f"{where}: {type(error.orig).__name__}: {error.orig}")


def _prepare(connection: Connection, where: str, secret: bytes | None) -> bytes:
    """Make the tables of a new store or check those of an old one; returns the secret."""
    present = set(inspect(connection).get_table_names())
    if not present:
        tables.metadata.create_all(connection)
        connection.execute(
            insert(tables.meta), {"name": "format", "value": str(tables.FORMAT).encode()}
        )
        zeros = [{"name": name, "value": 0} for name in tables.COUNTERS]
        connection.execute(insert(tables.counters), zeros)
    elif tables.meta.name not in present:
        raise StoreError(f"{where}: it is not a Fulmen store", hint="give the path of a run.db")
    query = select(tables.meta.c.name, tables.meta.c.value)
    found = {row.name: row.value for row in connection.execute(query)}
    _check_format(int(found.get("format", b"0")), where)
    if secret is None:
        secret = found.get("secret")
    if secret is None:
        secret = secrets.token_bytes(32)
        connection.execute(insert(tables.meta), {"name": "secret", "value": secret})
    return secret


def _check_format(found: int, where: str) -> None:
    if found == tables.FORMAT:
        return
    age, remedy = (
        ("a newer", "upgrade Fulmen")
        if found > tables.FORMAT
        else ("an older", "go on with the version that began the run")
    )
    raise StoreError(
        f"{where}: written by {age} Fulmen (store format {found}, this one reads {tables.FORMAT})",
        hint=f"{remedy}, or start a new run",
    )


def _engine(where: str, *, begin: str) -> Engine:
    """`begin`: the statement that opens a transaction."""

    def connect() -> sqlite3.Connection:
        # A URI, so that a path with "?" or "%" means itself, and mode=rw, so that a file deleted
        # meanwhile is an error instead of an empty store.
        target = MEMORY if where == MEMORY else f"file:{quote(where)}?mode=rw"
        connection = sqlite3.connect(
            target,
            uri=where != MEMORY,
            timeout=_BUSY_TIMEOUT_S,
            check_same_thread=False,
            # sqlite3's own way of beginning transactions breaks savepoints; `begin` does it.
            isolation_level=None,
        )
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            # A commit survives the end of the process; a power cut may take the last ones, never
            # the file.
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")
        except BaseException:
            connection.close()
            raise
        return connection

    if where == MEMORY:
        engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool)
    else:
        # As many connections as there are threads that read; the event loops bound those.
        engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, max_overflow=-1)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine
