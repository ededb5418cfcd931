"""Tables of pyarrow, batch by batch, as rows. `fulmen[data]` brings pyarrow."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from fulmen.schema.errors import DataError
from fulmen.trainer.sources.rows import Row, one_line, plain

_ROWS = 256
"""Rows that are Python objects and columns at the same time."""


def need_pyarrow(name: object) -> Any:  # noqa: ANN401 - the package is there only with its extra
    """Import pyarrow, to read what is called `name`.

    Raises:
        DataError: it is not installed.
    """
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise DataError(
            f"{name}: reading it needs the package pyarrow", hint='pip install "fulmen[data]"'
        ) from None
    return pyarrow


def batch_rows(batches: Iterable[Any], name: str, first: int = 1) -> Iterator[Row]:
    """Rows of record batches of one schema, numbered from `first`.

    Raises:
        DataError: two columns have one name, or a value is no JSON.
    """
    number = first
    for batch in batches:
        _check_names(batch.schema.names, name)
        decoders = {field.name: _decoder(field.type) for field in batch.schema}
        for start in range(0, batch.num_rows, _ROWS):
            for value in _values(batch.slice(start, _ROWS), name, number):
                where = f"{name}: row {number}"
                for column, decode in decoders.items():
                    if decode is not None:
                        value[column] = _decoded(decode, value[column], where, column)
                yield Row(where, plain(value, where))
                number += 1


def _check_names(names: list[str], name: str) -> None:
    for column, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{name}: {count} columns are named {column!r}", hint="rename one")


def _values(batch: Any, name: str, first: int) -> list[dict[str, Any]]:  # noqa: ANN401 - pyarrow's
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, KeyError, OverflowError):
        # The message says what is wrong, but not where.
        for row in range(batch.num_rows):
            for column in batch.schema.names:
                try:
                    batch.column(column)[row].as_py(maps_as_pydicts="strict")
                except (ValueError, KeyError, OverflowError) as error:
                    raise _unreadable(error, f"{name}: row {first + row}, {column!r}") from None
        raise


def _unreadable(error: Exception, where: str) -> DataError:
    # Without pandas nanoseconds end here, with it in `plain`.
    if "anosecond" in str(error):
        return DataError(f"{where}: has nanoseconds", hint="round it to microseconds")
    return DataError(f"{where}: {one_line(error)}", hint="leave it out, or store text")


Decoder = Callable[[Any], Any]


def _decoder(kind: Any) -> Decoder | None:  # noqa: ANN401 - a type of pyarrow
    """What reads the JSON texts in values of this type; None where there are none.

    `datasets` stores values of changing form so, as texts of the extension type `arrow.json`.
    """
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return msgspec.json.decode
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _decoder(kind.value_type)
        return inner and (lambda items: [_unless_null(inner, item) for item in items])
    if types.is_struct(kind):
        decoders = {field.name: found for field in kind if (found := _decoder(field.type))}
        if decoders:
            return lambda struct: {
                key: _unless_null(decoders[key], item) if key in decoders else item
                for key, item in struct.items()
            }
    return None


def _unless_null(decode: Decoder, value: Any) -> Any:  # noqa: ANN401 - any JSON
    return None if value is None else decode(value)


def _decoded(decode: Decoder, value: Any, where: str, column: str) -> Any:  # noqa: ANN401 - any JSON
    try:
        return _unless_null(decode, value)
    except msgspec.DecodeError as error:
        raise DataError(
            f"{where}, {column!r}: not valid JSON ({one_line(error)})", hint="write it anew"
        ) from None
