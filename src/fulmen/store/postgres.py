"""PostgreSQL: one server for any number of processes on any number of machines.

Each run has a schema (namespace) of its own. Rows are locked by those who change them, processes
tell each other by LISTEN and NOTIFY, and a connection that is lost is made anew.
"""

import contextlib
import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine, and_, create_engine, func, insert, select, text
from sqlalchemy import delete as delete_from
from sqlalchemy import update as update_of
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from fulmen.schema.errors import StoreError
from fulmen.schema.place import checked_url, schema_of, without_password, without_schema
from fulmen.store import tables
from fulmen.store.database import READERS, Change
from fulmen.store.ears import Ears, first_line
from fulmen.store.news import from_notice, to_notices
from fulmen.store.reads import states

DEFAULT_SCHEMA = "fulmen"
PATIENCE_S = 60.0

_CONNECT_TIMEOUT_S = 30
_SETTINGS = {
    # A process that stands still in a transaction, and holds rows, is cut off.
    "idle_in_transaction_session_timeout": "60000",
    "application_name": "fulmen",
}
_KEEPALIVES = {
    # A server that vanished without a word is noticed within half a minute.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

_PASSING = ("08", "40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03", "25P03")
"""Beginnings of SQLSTATEs that say nothing about the work: connections, deadlocks, restarts."""

_CAUSES = {
    "28": ("the server refuses the user or the password", "set PGPASSWORD, or write ~/.pgpass"),
    "40": ("another process changed the same at the same time", "try again"),
    "3D": ("there is no such database", "make it with createdb, or correct the URL"),
    "42501": ("the user may not do that", "GRANT CREATE ON DATABASE … TO the user"),
    "53100": ("no space left on the server's disk", "free some space and resume"),
    "53": ("the server has no room for more", "raise its limits, or stop other clients"),
    "57P": ("the server was stopped", "start it and resume"),
    "25006": ("the server takes no changes", "give the address of the primary, not of a replica"),
}
"""By the beginning of the SQLSTATE: what it means for the user, and what to do."""


class PostgresDatabase:
    """One run's schema in a database, for one process."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        """Connects to nothing yet.

        Args:
            url: `postgresql://user:password@host:port/database?schema=name`; the rest of its
                parameters are libpq's.
            patience_s: how long a lost server is waited for.

        Raises:
            StoreError: it is no such URL.
        """
        try:
            checked_url(url)
        except ValueError as error:
            raise StoreError(
                f"{without_password(url)}: no place for a store", hint=str(error)
            ) from None
        self.where, self.patience_s = without_password(url), patience_s
        self.schema = schema_of(url) or DEFAULT_SCHEMA
        self._sender = secrets.token_hex(8)
        self._url = make_url(without_schema(url)).set(drivername="postgresql+psycopg")
        self._options = _options(self._url, self.schema)
        self._writing = create_engine(
            self._url,
            isolation_level="READ COMMITTED",
            connect_args=self._options,
            pool_size=1,
            max_overflow=0,
        )
        self._reading = create_engine(
            self._url,
            isolation_level="REPEATABLE READ",  # one snapshot for all queries of a look
            connect_args=self._options,
            pool_size=READERS,
            max_overflow=1,  # the ears look, too
        )
        self._ears: Ears | None = None

    @property
    def writing(self) -> Engine:
        return self._writing

    @property
    def reading(self) -> Engine | None:
        return self._reading

    @contextlib.contextmanager
    def preparing(self, make: bool, /) -> Iterator[Connection]:
        with self._writing.begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(_lock(self.schema))))
            known = text("SELECT 1 FROM pg_namespace WHERE nspname = :name")
            if make and connection.scalar(known, {"name": self.schema}) is None:
                connection.execute(text(f"CREATE SCHEMA {self.schema}"))
            yield connection

    def keep_copy(self, _: str, /) -> None:
        return  # whoever runs a server has backups of it; the migration is one transaction

    def explain(self, error: DBAPIError) -> StoreError:
        what = first_line(error.orig)
        state = getattr(error.orig, "sqlstate", None) or _state_of_refusal(what)
        for beginning, (cause, hint) in _CAUSES.items():
            if state.startswith(beginning):
                return StoreError(f"{self.where}: {cause} ({what})", hint=hint)
        if self.passes(error):
            return StoreError(
                f"{self.where}: the server cannot be reached ({what})",
                hint="see that it runs and lets you in, then resume",
            )
        return StoreError(f"{self.where}: {type(error.orig).__name__}: {what}")

    def passes(self, error: DBAPIError) -> bool:
        if error.connection_invalidated:
            return True
        state = getattr(error.orig, "sqlstate", None)
        if state is None:  # the server was not reached, or did not answer to the end
            return isinstance(error.orig, psycopg.OperationalError)
        return state.startswith(_PASSING)

    def enroll(self, connection: Connection) -> None:
        connection.execute(insert(tables.writers), {"name": self._sender, "batch": 0})

    def first_time(self, connection: Connection, batch: int) -> bool:
        c, mine = tables.writers.c, tables.writers.c.name == self._sender
        # Waits for a lost connection's transaction, if the server still works on it.
        move = update_of(tables.writers).where(and_(mine, c.batch == batch - 1))
        if connection.execute(move.values(batch=batch)).rowcount:
            return True
        if connection.scalar(select(c.batch).where(mine)) == batch:
            return False
        raise StoreError(
            f"{self.where}: the database has forgotten what it had confirmed",
            hint="was an older copy of it restored? resume the run from its last checkpoint",
        )

    def hold(self, connection: Connection, rollout_ids: Collection[str]) -> None:
        states(connection, rollout_ids, hold=True)

    def tell(self, connection: Connection, changes: Iterable[Change[object]]) -> None:
        for notice in to_notices(self._sender, changes):
            connection.execute(select(func.pg_notify(self.schema, notice)))

    def listen(self, heard: Callable[[Change[None]], None], again: Callable[[float], None]) -> None:
        def told(notice: str) -> None:
            sender, change = from_notice(notice)
            if sender == self._sender:
                return
            if change is None:
                again(0.0)
            else:
                heard(change)

        self._ears = Ears(self._connect, self.schema, where=self.where, heard=told, again=again)

    def size(self, connection: Connection) -> int:
        sizes = (
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = :name AND c.relkind = 'r'"
        )
        return int(connection.scalar(text(sizes), {"name": self.schema}) or 0)

    def compact(self) -> None:
        return  # autovacuum does it, while others go on working

    def close(self) -> None:
        if self._ears is not None:
            self._ears.close()
        mine = delete_from(tables.writers).where(tables.writers.c.name == self._sender)
        # A row too many does no harm.
        with contextlib.suppress(SQLAlchemyError), self._writing.begin() as connection:
            connection.execute(mine)
        self._writing.dispose()
        self._reading.dispose()

    def _connect(self) -> psycopg.Connection:
        _, arguments = self._writing.dialect.create_connect_args(self._url)
        return psycopg.connect(**{**arguments, **self._options}, autocommit=True)


def _options(url: URL, schema: str) -> dict[str, Any]:
    """What a connection is made with, beside what the URL says, which comes first."""
    settings = {**_SETTINGS, "search_path": schema}
    given = url.query.get("options", "")
    ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
    options: dict[str, Any] = {"connect_timeout": _CONNECT_TIMEOUT_S, **_KEEPALIVES}
    kept = {name: value for name, value in options.items() if name not in url.query}
    return {**kept, "options": f"{ours} {given}".strip()}


def _state_of_refusal(what: str) -> str:
    """The SQLSTATE that a server had when it let nobody in; libpq passes on only its words.

    >>> _state_of_refusal('FATAL:  password authentication failed for user "me"')
    '28P01'
    """
    if "password" in what:
        return "28P01"
    return "3D000" if "database" in what and "does not exist" in what else ""


def _lock(schema: str) -> int:
    """The number of the advisory lock that those who prepare this schema take."""
    digest = hashlib.blake2b(f"fulmen/{schema}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
