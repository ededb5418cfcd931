"""CSV and TSV: the first line names the columns, every value is text."""

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fulmen.schema.errors import DataError
from fulmen.trainer.sources.rows import Row, one_line

_LONGEST = 2**31 - 1
"""Characters of a cell: the csv module's own limit of 131,072 is less than a document may have."""


def _rows(path: Path, *, separator: str) -> Iterator[Row]:
    """Rows of a file with a header, read one by one; empty lines are left out.

    Raises:
        DataError: no header, a name missing or there twice, a row of another length, a quote that
            is never closed, or text that is not UTF-8.
    """
    with path.open(encoding="utf-8-sig", newline="") as file, _long_cells():
        reader = csv.reader(file, delimiter=separator, strict=True)
        names: Sequence[str] | None = None
        begun = 1
        try:
            for cells in reader:
                where, begun = f"{path}:{begun}", reader.line_num + 1
                if not cells:
                    continue
                if names is None:
                    names = _header(cells, where)
                else:
                    yield Row(where, _row(names, cells, where))
        except csv.Error as error:
            raise DataError(
                f"{path}:{begun}: not valid {path.suffix[1:].upper()} ({one_line(error)})",
                hint="look for a quote that is not closed or not doubled",
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: not UTF-8 ({error.reason})", hint="save it as UTF-8"
            ) from None


csv_rows = partial(_rows, separator=",")
tsv_rows = partial(_rows, separator="\t")


@contextmanager
def _long_cells() -> Iterator[None]:
    before = csv.field_size_limit(_LONGEST)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _header(names: Sequence[str], where: str) -> Sequence[str]:
    hint = "the first line is to name the columns"
    for number, name in enumerate(names, start=1):
        if not name.strip():
            raise DataError(f"{where}: column {number} has no name", hint=hint)
        if _is_number(name):
            raise DataError(f"{where}: column {number} is named {name!r}, a number", hint=hint)
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{where}: {count} columns are named {name!r}", hint="rename one")
    return tuple(names)


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _row(names: Sequence[str], cells: Sequence[str], where: str) -> dict[str, str]:
    if len(cells) != len(names):
        short = f", {names[len(cells)]!r} has none" if len(cells) < len(names) else ""
        raise DataError(
            f"{where}: {len(cells)} values for {len(names)} columns{short}",
            hint="quote values that hold the separator or a line break",
        )
    return dict(zip(names, cells, strict=True))
