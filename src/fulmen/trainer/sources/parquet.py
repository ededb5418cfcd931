"""Parquet: rows of a file, read row group by row group."""

from collections.abc import Iterator
from pathlib import Path

from fulmen.schema.errors import DataError
from fulmen.trainer.sources.columns import batch_rows, need_pyarrow
from fulmen.trainer.sources.rows import Row, one_line

_BATCH = 1024


def parquet_rows(path: Path) -> Iterator[Row]:
    """Rows of a Parquet file.

    Raises:
        DataError: pyarrow is not installed, the file is damaged or of another format, or a value
            is no JSON.
    """
    arrow = need_pyarrow(path)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from batch_rows(file.iter_batches(batch_size=_BATCH), str(path))
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read as Parquet ({one_line(error)})", hint="write it anew"
        ) from None
