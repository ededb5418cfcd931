"""Queries on a SQLite file that can neither change it nor run for long."""

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 3.0
MOST_ROWS = 10_000
MOST_CHARACTERS = 10_000_000
"""Rows, and characters of text in them, read at most; a query that returns more is an error."""
_STEPS = 1000
"""Instructions of SQLite's machine between two looks at the clock."""
_SHOWN_ROWS = 3
_SHOWN_CHARACTERS = 200
_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_REFUSED_FUNCTIONS = {"load_extension", "randomblob", "zeroblob"}

Row = tuple[object, ...]


@dataclass(frozen=True)
class Rows:
    """What a query returned."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class Failure:
    """Why a query returned nothing."""

    reason: str


def run_query(database: str | Path, query: str, *, timeout_s: float = TIMEOUT_S) -> Rows | Failure:
    """Run one reading statement.

    The file is opened read-only, `query_only` is on, and an authorizer refuses everything but
    selecting and reading: no writes, no ATTACH, no PRAGMA, no extensions. A query may take
    `timeout_s` seconds and return `MOST_ROWS` rows.

    Raises:
        FileNotFoundError: there is no such database.
    """
    if not Path(database).is_file():
        raise FileNotFoundError(f"{database}: no such database")
    ends = time.monotonic() + timeout_s
    with closing(_open(Path(database))) as connection:
        connection.set_progress_handler(lambda: int(time.monotonic() > ends), _STEPS)
        try:
            return _read(connection.execute(query))
        except sqlite3.OperationalError as error:
            late = str(error) == "interrupted"
            return Failure(f"took more than {timeout_s:g} s" if late else str(error))
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            return Failure(str(error))


def _read(cursor: sqlite3.Cursor) -> Rows | Failure:
    rows, characters = [], 0
    for row in cursor:
        rows.append(row)
        characters += sum(len(value) for value in row if isinstance(value, str | bytes))
        if len(rows) > MOST_ROWS or characters > MOST_CHARACTERS:
            return Failure("more rows or text than can be read")
    return Rows(rows)


def _open(database: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    connection.text_factory = lambda raw: raw.decode(errors="replace")  # Spider has bad UTF-8
    connection.execute("PRAGMA query_only = ON")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_CHARACTERS)
    connection.set_authorizer(_authorize)
    return connection


def _authorize(action: int, _: str | None, function: str | None, *__: str | None) -> int:
    refused = action == sqlite3.SQLITE_FUNCTION and function in _REFUSED_FUNCTIONS
    return sqlite3.SQLITE_OK if action in _ALLOWED and not refused else sqlite3.SQLITE_DENY


def shown(result: Rows | Failure) -> str:
    """A result as a model reads it: the first rows, or the error.

    >>> shown(Rows([("Ana", 31), ("Ben", None)]))
    'Ana, 31\\nBen, NULL'
    >>> shown(Rows([(n,) for n in range(9)]))
    '0\\n1\\n2\\n... 9 rows'
    >>> shown(Rows([])), shown(Failure("no such column: x"))
    ('no rows', 'error: no such column: x')
    """
    if isinstance(result, Failure):
        return f"error: {result.reason}"[:_SHOWN_CHARACTERS]
    if not result.rows:
        return "no rows"
    lines = [", ".join(map(_value, row)) for row in result.rows[:_SHOWN_ROWS]]
    text = "\n".join(lines)[:_SHOWN_CHARACTERS]
    return f"{text}\n... {len(result.rows)} rows" if len(result.rows) > _SHOWN_ROWS else text


def _value(value: object) -> str:
    if value is None:
        return "NULL"
    return f"{value:g}" if isinstance(value, float) else str(value)
