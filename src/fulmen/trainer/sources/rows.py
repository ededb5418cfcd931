"""One task as its source has it: where it stands, and a plain JSON value."""

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from fulmen.schema.errors import DataError
from fulmen.schema.records import JSON


class Row(NamedTuple):
    """One task of a source, not yet checked."""

    where: str
    """As messages name it: `tasks.jsonl:17`, `tasks.parquet: row 17`."""
    value: JSON


def one_line(error: BaseException) -> str:
    """What a library says is wrong, short enough for a line of ours."""
    return " ".join(str(error).split())[:200]


def iterable_rows(items: Iterable[object], name: str) -> Iterator[Row]:
    """Rows of any Python iterable, one at a time.

    Raises:
        DataError: it is a text, a mapping or a table, of which the parts are no tasks; or a value
            is no JSON.
    """
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        kind = type(items).__name__
        raise DataError(f"{name}: is a {kind}, not an iterable of tasks", hint="give a list")
    if hasattr(items, "columns"):
        # Iterating over a data frame gives the names of its columns, which would do as tasks.
        raise DataError(
            f"{name}: is a {type(items).__name__}, not an iterable of tasks",
            hint="give its rows as dicts",
        )
    for number, item in enumerate(items, start=1):
        where = f"{name}: item {number}"
        yield Row(where, plain(item, where))


def plain(value: object, where: str, path: str = "") -> JSON:
    """A value of Python or of a table as JSON.

    Dates and times become ISO text, durations seconds, decimals and UUIDs text. `path` names the
    value's place in the row.

    Raises:
        DataError: JSON has no such value: bytes, NaN, a key that is no text.

    >>> plain({"when": date(2026, 1, 2), "price": [Decimal("1.50")]}, "t.parquet: row 1")
    {'when': '2026-01-02', 'price': ['1.50']}
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _text(value, where, path)
    if isinstance(value, list | tuple):
        return [plain(item, where, path) for item in value]
    if isinstance(value, Mapping):
        return {
            _key(key, where, path): plain(item, where, f"{path}.{key}" if path else str(key))
            for key, item in value.items()
        }
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _no_json(f"{value} is no number", "write a number or null", where, path)
        return float(value)
    return _scalar(value, where, path)


def _scalar(value: object, where: str, path: str) -> JSON:
    # Types of pandas are read by their standard ancestors, and have digits that those have not.
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise _no_json("has nanoseconds", "round it to microseconds", where, path)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID) or (isinstance(value, Decimal) and value.is_finite()):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise _no_json("bytes are no JSON", "leave it out, or store text", where, path)
    kind = type(value).__name__
    raise _no_json(f"{kind} is no kind of JSON", "give dicts, lists, text, numbers", where, path)


def _text(value: str, where: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _no_json(f"no Unicode text ({error.reason})", "repair it", where, path) from None
    return value


def _key(key: object, where: str, path: str) -> str:
    if not isinstance(key, str):
        raise _no_json(f"the key {key!r} is no text", "use text", where, path)
    return key


def _no_json(what: str, hint: str, where: str, path: str) -> DataError:
    return DataError(f"{where}{f', {path!r}' if path else ''}: {what}", hint=hint)
