"""JSONL: one JSON value a line."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from fulmen.schema.errors import DataError
from fulmen.trainer.sources.rows import Row

_MARK = b"\xef\xbb\xbf"
"""What some programs begin a UTF-8 file with."""


def line_rows(path: Path) -> Iterator[Row]:
    """Rows of a JSONL file, read line by line; empty lines are left out.

    Raises:
        DataError: a line is no JSON.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_MARK).strip() if number == 1 else line.strip()
            if text:
                where = f"{path}:{number}"
                yield Row(where, _value(text, where))


def _value(text: bytes, where: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise DataError(
            f"{where}: not valid JSON ({reason})", hint="fix or delete the line"
        ) from None
