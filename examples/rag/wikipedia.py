"""Wikipedia as a corpus, from the file that DPR published.

    python wikipedia.py psgs_w100.tsv --out wiki.jsonl

`psgs_w100.tsv` (V. Karpukhin et al., Dense Passage Retrieval, 2020) has 21 million passages of 100
words, one a line after its header: `id`, `text` (quoted, quotes in it doubled) and `title`, with
tabs between.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from retrieval import BadCorpus, Passage, write_passages

COLUMNS = ["id", "text", "title"]


def read_tsv(path: Path) -> Iterator[Passage]:
    """The passages of the file, in its order.

    Raises:
        BadCorpus: in one line, file, line and what is wrong.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, delimiter="\t")
            if next(rows, None) != COLUMNS:
                raise BadCorpus(f"{path}:1: the columns are not {', '.join(COLUMNS)}")
            for row in rows:
                if len(row) != len(COLUMNS):
                    raise BadCorpus(f"{path}:{rows.line_num}: {len(row)} columns instead of 3")
                yield Passage(row[2], row[1])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadCorpus(f"{path}: cannot be read ({error})") from None


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert DPR's Wikipedia to a corpus.")
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        write_passages(options.out, read_tsv(options.source))
    except BadCorpus as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"passages written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
