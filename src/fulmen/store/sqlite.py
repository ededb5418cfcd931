"""SQLite: one file in WAL mode, embedded in the process that owns the run."""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from fulmen.schema.clock import steady_time
from fulmen.schema.errors import StoreError
from fulmen.store import tables
from fulmen.store.database import READERS, Change

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


class SqliteDatabase:
    """A file, or ":memory:". One process writes to it, so nobody else has to be told anything."""

    patience_s = 0.0

    def __init__(self, where: str) -> None:
        """Opens nothing yet."""
        self.where = where
        self._writing = _engine(where, begin="BEGIN IMMEDIATE")
        self._reading = None if where == MEMORY else _engine(where, begin="BEGIN")

    @property
    def writing(self) -> Engine:
        return self._writing

    @property
    def reading(self) -> Engine | None:
        return self._reading

    @contextlib.contextmanager
    def preparing(self, make: bool, /) -> Iterator[Connection]:
        if make and self.where != MEMORY:
            self._make_file()
        # A migration that copies a table deletes the old one, and with foreign keys on the rows
        # that refer to it; SQLite switches them outside of transactions only.
        memory = self.where == MEMORY
        engine = (
            self._writing
            if memory
            else _engine(self.where, begin="BEGIN IMMEDIATE", foreign_keys=False)
        )
        try:
            with engine.begin() as connection:
                yield connection
        finally:
            if not memory:
                engine.dispose()

    def _make_file(self) -> None:
        try:
            # It may hold the secret. SQLite gives its -wal and -shm files the same permissions.
            Path(self.where).touch(mode=0o600, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self.where}: {error.strerror}",
                hint="make the folder, and check its permissions",
            ) from error

    def keep_copy(self, name: str) -> None:
        copy = Path(f"{self.where}.{name}")
        unfinished = Path(f"{copy}.new")
        try:
            os.close(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            with (
                contextlib.closing(_connect(self.where)) as source,
                contextlib.closing(sqlite3.connect(unfinished)) as target,
            ):
                source.backup(target)
            unfinished.replace(copy)
        except (OSError, sqlite3.Error) as error:
            unfinished.unlink(missing_ok=True)
            raise StoreError(
                f"{self.where}: it could not be copied to {copy} before its migration: {error}",
                hint="free some space, and check the folder's permissions",
            ) from error

    def explain(self, error: DBAPIError) -> StoreError:
        return self._in_words(error.orig)

    def _in_words(self, error: BaseException | None) -> StoreError:
        name = getattr(error, "sqlite_errorname", "")
        for beginning, (cause, hint) in _CAUSES.items():
            if name.startswith(beginning):
                return StoreError(f"{self.where}: {cause}", hint=hint)
        return StoreError(f"{self.where}: {type(error).__name__}: {error}")

    def passes(self, _: DBAPIError, /) -> bool:
        return False

    def enroll(self, connection: Connection, /) -> None:
        # What rests for a while has rested while nobody was there, and the clock by which it was
        # to rest has ended with the process before.
        c = tables.rollouts.c
        rests = update(tables.rollouts).where(c.not_before.is_not(None))
        connection.execute(rests.values(not_before=None))

    def first_time(self, _: Connection, _batch: int, /) -> bool:
        return True

    def hold(self, _: Connection, __: Collection[str], /) -> None:
        return  # nobody else writes

    def tell(self, _: Connection, _changes: Iterable[Change[object]], /) -> None:
        return

    def listen(self, _: Callable[[Change[None]], None], _again: Callable[[float], None], /) -> None:
        return

    def size(self, _: Connection, /) -> int:
        files = (Path(self.where + ending) for ending in ("", "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def compact(self) -> None:
        try:
            with contextlib.closing(_connect(self.where)) as connection:
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise self._in_words(error) from error

    def close(self) -> None:
        self._writing.dispose()
        if self._reading:
            self._reading.dispose()


def _connect(where: str, *, foreign_keys: bool = True) -> sqlite3.Connection:
    # A URI, so that a path with "?" or "%" means itself, and mode=rw, so that a file deleted
    # meanwhile is an error instead of an empty store.
    target = MEMORY if where == MEMORY else f"file:{quote(where)}?mode=rw"
    connection = sqlite3.connect(
        target,
        uri=where != MEMORY,
        timeout=_BUSY_TIMEOUT_S,
        check_same_thread=False,
        # sqlite3's own way of beginning transactions breaks savepoints; the engine does it.
        isolation_level=None,
    )
    try:
        connection.create_function("fulmen_now", 0, steady_time)
        connection.execute("PRAGMA journal_mode=WAL")
        # A commit survives the end of the process; a power cut may take the last ones, never the
        # file.
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
    except BaseException:
        connection.close()
        raise
    return connection


def _engine(where: str, *, begin: str, foreign_keys: bool = True) -> Engine:
    """`begin`: the statement that opens a transaction."""

    def connect() -> sqlite3.Connection:
        return _connect(where, foreign_keys=foreign_keys)

    if where == MEMORY:
        engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool)
    elif not foreign_keys:
        engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    else:
        engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=READERS)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine
