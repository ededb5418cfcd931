"""The real MuSiQue questions as Fulmen tasks, and their paragraphs as a corpus.

    python musique.py musique_ans_v1.0_train.jsonl --out train.jsonl --corpus corpus.jsonl

MuSiQue (H. Trivedi et al., 2022) publishes one question a line: `id`, `question`, `answer`,
`answer_aliases`, `answerable`, `question_decomposition` (the hops), and `paragraphs`, a list of
`{idx, title, paragraph_text, is_supporting}`. Give several files to make one corpus of them all;
without `--corpus` only the tasks are written, for a corpus of one's own such as Wikipedia.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from retrieval import Passage, write_passages

T = TypeVar("T")


class BadFile(Exception):
    """A file that is not of MuSiQue, or cannot be read."""


def read_rows(path: Path) -> Iterator[tuple[dict, str]]:
    """The rows of a file, each with its place.

    Raises:
        BadFile: with file, line and reason.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise BadFile(f"{where}: not valid JSON ({error})") from None
                if not isinstance(row, dict):
                    raise BadFile(f"{where}: not an object")
                yield row, where
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path}: cannot be read ({error})") from None


def to_task(row: dict, where: str) -> dict | None:
    """A task of Fulmen; None for a question that its paragraphs do not answer.

    The number of hops is in its metadata, for graders and statistics.

    Raises:
        BadFile: a field is missing or of another type.
    """
    if not _field(row, "answerable", bool, where):
        return None
    return {
        "id": _field(row, "id", str, where),
        "question": _field(row, "question", str, where),
        "metadata": {
            "answer": _field(row, "answer", str, where),
            "aliases": _field(row, "answer_aliases", list, where),
            "hops": len(_field(row, "question_decomposition", list, where)),
        },
    }


def to_passages(row: dict, where: str) -> list[Passage]:
    """The paragraphs of a row, those that mislead included.

    Raises:
        BadFile: a field is missing or of another type.
    """
    passages = []
    for number, paragraph in enumerate(_field(row, "paragraphs", list, where)):
        place = f"{where}: paragraphs[{number}]"
        if not isinstance(paragraph, dict):
            raise BadFile(f"{place}: not an object")
        title = _field(paragraph, "title", str, place)
        passages.append(Passage(title, _field(paragraph, "paragraph_text", str, place)))
    return passages


def _field(row: dict, name: str, kind: type[T], where: str) -> T:
    if name not in row:
        raise BadFile(f"{where}: no field {name!r}; is this a file of MuSiQue?")
    value = row[name]
    if not isinstance(value, kind):
        raise BadFile(f"{where}: {name} is {json.dumps(value)[:40]}, not a {kind.__name__}")
    return value


def convert(sources: list[Path], out: Path, corpus: Path | None) -> tuple[int, int, int]:
    """Write tasks and passages; returns how many of each, and how many rows had no answer."""
    written = skipped = 0
    passages: dict[Passage, None] = {}
    with out.open("w", encoding="utf-8") as file:
        for source in sources:
            for row, where in read_rows(source):
                if corpus is not None:
                    passages |= dict.fromkeys(to_passages(row, where))
                task = to_task(row, where)
                if task is None:
                    skipped += 1
                    continue
                file.write(json.dumps(task) + "\n")
                written += 1
    if corpus is not None:
        write_passages(corpus, passages)
    return written, len(passages), skipped


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert files of MuSiQue to tasks.")
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path)
    options = parser.parse_args()
    try:
        written, passages, skipped = convert(options.sources, options.out, options.corpus)
    except (BadFile, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{written} tasks and {passages} passages written; {skipped} rows without an answer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
