"""The real Calc-X problems as Fulmen tasks.

    python calcx.py path/to/gsm8k/train.parquet --out train.jsonl

Calc-X (MU-NLPC/Calc-X on the Hugging Face hub) publishes one row a problem with the columns `id`,
`question` (word problem), `chain` (a solution with calculator calls, not used here), `result` (the
answer as text, fractions and percentages included) and `result_float` where it is a number.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path


class BadFile(Exception):
    """A file that is not of Calc-X, or cannot be read."""


def read_rows(path: Path) -> Iterator[dict]:
    """Rows of a JSONL or parquet file.

    Raises:
        BadFile: with file, line and reason.
    """
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet  # pyright: ignore[reportMissingImports] - optional
        except ImportError:
            raise BadFile(
                f"{path}: reading parquet needs pyarrow; pip install pyarrow, or give JSONL"
            ) from None
        yield from parquet.read_table(path).to_pylist()
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadFile(f"{path}:{number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise BadFile(f"{path}:{number}: not an object")
        yield row


def to_task(row: dict, where: str) -> dict | None:
    """A task of Fulmen; None for a row whose answer is no number.

    Raises:
        BadFile: a column is missing.
    """
    for column in ("id", "question", "result"):
        if column not in row:
            raise BadFile(f"{where}: no column {column!r}; is this a file of Calc-X?")
    number = _number(row.get("result_float"), row["result"])
    if number is None:
        return None
    return {
        "id": str(row["id"]),
        "question": row["question"],
        "metadata": {"answer": number, "result": row["result"]},
    }


def _number(exact: object, text: object) -> float | None:
    if isinstance(exact, int | float) and exact == exact:
        return float(exact)
    clean = str(text).replace(",", "").replace("_", "").replace("$", "").strip()
    try:
        if clean.endswith("%"):
            return float(Fraction(clean[:-1].strip()) / 100)
        return float(Fraction(clean))
    except (ValueError, ZeroDivisionError):
        return None


def convert(source: Path, out: Path) -> tuple[int, int]:
    """Write tasks; returns how many, and how many rows had no numeric answer."""
    written = skipped = 0
    with out.open("w", encoding="utf-8") as file:
        for number, row in enumerate(read_rows(source), start=1):
            task = to_task(row, f"{source}, row {number}")
            if task is None:
                skipped += 1
                continue
            file.write(json.dumps(task) + "\n")
            written += 1
    return written, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert files of Calc-X to tasks.")
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        written, skipped = convert(options.source, options.out)
    except (BadFile, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{written} tasks written to {options.out}; {skipped} rows without a numeric answer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
