"""Which reader a source has: a table by suffix, and what is no file."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fulmen.schema.config import nearest
from fulmen.schema.errors import DataError
from fulmen.trainer.sources.functions import function_rows
from fulmen.trainer.sources.lines import line_rows
from fulmen.trainer.sources.parquet import parquet_rows
from fulmen.trainer.sources.rows import Row
from fulmen.trainer.sources.saved import saved_rows
from fulmen.trainer.sources.separated import csv_rows, tsv_rows

READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": line_rows,
    ".ndjson": line_rows,
    "": line_rows,
    ".csv": csv_rows,
    ".tsv": tsv_rows,
    ".parquet": parquet_rows,
}

_FUNCTION = re.compile(r"^(.+\.py|[A-Za-z_][\w.]*):\w+$")


def read_rows(source: Path | str) -> Iterator[Row]:
    """Rows of a file by its suffix, of a folder or `folder:split`, or of `file.py:function`.

    Raises:
        DataError: there is no such source, it is of no known kind, or a row cannot be read.
    """
    path = Path(source)
    before, colon, after = str(source).rpartition(":")
    if path.is_dir():
        yield from saved_rows(path, None)
    elif colon and Path(before).is_dir():
        yield from saved_rows(Path(before), after)
    elif _FUNCTION.match(str(source)) and not path.exists():
        yield from function_rows(str(source))
    else:
        yield from _file_rows(path)


def _file_rows(path: Path) -> Iterator[Row]:
    read = READERS.get(path.suffix.lower())
    try:
        path.stat()
        if read is None:
            kind = path.suffix
            raise DataError(f"{path}: tasks are not read from {kind} files", hint=_known(path))
        yield from read(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", hint="check the path of the tasks") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _known(path: Path) -> str:
    if path.suffix.lower() == ".json":
        return "write one task a line, as .jsonl"
    if path.suffix.lower() == ".py":
        return f"name the function, as {path}:load"
    return nearest(path.suffix, [suffix for suffix in READERS if suffix])
