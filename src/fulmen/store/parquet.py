"""One table as one Parquet file, and back, a few megabytes at a time.

Every column is what a reader expects of it: token ids are lists of int32, log-probabilities lists
of float32, bit for bit; records are the JSON texts that the table has; times are Unix seconds.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Boolean, Column, Connection, Double, Integer, LargeBinary, Table, select

from fulmen.schema.errors import DataError
from fulmen.store.rows import Row

_ARRAYS = {"prompt_ids": "<i4", "completion_ids": "<i4", "logprobs": "<f4"}
"""Packed columns, and what they are arrays of."""
_FETCH = 64
"""Rows that a database hands over at once; a call may be a megabyte."""
_GROUP_BYTES, _GROUP_ROWS = 16 << 20, 20_000
"""A row group is as large as either, about."""
_INSERT = 256


def need_pyarrow() -> Any:  # noqa: ANN401 - the package is there only with its extra
    """Raises DataError if pyarrow is not installed."""
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise DataError(
            "an archive is made of Parquet files, which needs the package pyarrow",
            hint='pip install "fulmen[data]"',
        ) from None
    return pyarrow


def write_table(connection: Connection, table: Table, path: Path) -> int:
    """Write all rows of a table, in the order of its primary key; returns how many."""
    arrow = need_pyarrow()
    from pyarrow import parquet

    schema = arrow.schema([_field(column) for column in table.columns])
    texts: Any = [field.name for field in schema if field.type == arrow.string()]
    written = 0
    with parquet.ParquetWriter(path, schema, compression="zstd", use_dictionary=texts) as writer:
        for rows in _groups(connection, table):
            arrays = [_array(field, [row[i] for row in rows]) for i, field in enumerate(schema)]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            written += len(rows)
    return written


def read_table(path: Path, table: Table) -> Iterator[list[Row]]:
    """The rows of a file that `write_table` wrote, for an INSERT into the table.

    Raises:
        DataError: the file is damaged, or has other columns.
    """
    arrow = need_pyarrow()
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            expected = {column.name for column in table.columns}
            if (names := set(file.schema_arrow.names)) != expected:
                odd = ", ".join(sorted(names ^ expected))
                raise DataError(f"{path}: its columns are not those of {table.name} ({odd})")
            for batch in file.iter_batches(batch_size=_INSERT):
                columns = [_values(batch.column(name)) for name in batch.schema.names]
                yield [
                    dict(zip(batch.schema.names, row, strict=True))
                    for row in zip(*columns, strict=True)
                ]
    except (arrow.ArrowException, OSError) as error:
        words = str(error).strip().splitlines()[0]
        raise DataError(f"{path}: cannot be read as Parquet ({words})") from None


def rows_in(path: Path) -> int:
    """How many rows a file says it has; raises DataError if it is damaged."""
    arrow = need_pyarrow()
    from pyarrow import parquet

    try:
        return parquet.read_metadata(path).num_rows
    except (arrow.ArrowException, OSError) as error:
        words = str(error).strip().splitlines()[0]
        raise DataError(f"{path}: cannot be read as Parquet ({words})") from None


def _groups(connection: Connection, table: Table) -> Iterator[list[Sequence[Any]]]:
    query = select(table).order_by(*table.primary_key).execution_options(yield_per=_FETCH)
    group: list[Sequence[Any]] = []
    size = 0
    for row in connection.execute(query):
        group.append(row)
        size += sum(len(value) for value in row if isinstance(value, str | bytes | memoryview))
        if size > _GROUP_BYTES or len(group) >= _GROUP_ROWS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _field(column: Column[Any]) -> Any:  # noqa: ANN401 - a pyarrow.Field
    arrow = need_pyarrow()
    kinds = {Boolean: arrow.bool_(), Double: arrow.float64(), Integer: arrow.int64()}
    plain = next((kind for of, kind in kinds.items() if isinstance(column.type, of)), None)
    if isinstance(column.type, LargeBinary):
        item = arrow.int32() if _ARRAYS[column.name] == "<i4" else arrow.float32()
        plain = arrow.list_(arrow.field("element", item, nullable=False))
    return arrow.field(column.name, plain or arrow.string(), nullable=bool(column.nullable))


def _array(field: Any, values: Sequence[Any]) -> Any:  # noqa: ANN401 - pyarrow's
    arrow = need_pyarrow()
    if not arrow.types.is_list(field.type):
        return arrow.array(values, field.type)
    ends = np.cumsum([0, *(len(value) // 4 for value in values)], dtype=np.int32)
    flat = np.frombuffer(b"".join(values), dtype=_ARRAYS[field.name])
    return arrow.ListArray.from_arrays(arrow.array(ends), arrow.array(flat), type=field.type)


def _values(column: Any) -> list[Any]:  # noqa: ANN401 - a pyarrow.Array
    if not need_pyarrow().types.is_list(column.type):
        return column.to_pylist()
    flat, ends = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return [flat[a:b].tobytes() for a, b in itertools.pairwise(ends)]
