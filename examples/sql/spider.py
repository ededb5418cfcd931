"""The real Spider questions as Fulmen tasks.

    python spider.py path/to/spider/train_spider.json --out train.jsonl
    python spider.py path/to/spider/dev.json --out val.jsonl

Spider (Yu et al. 2018, arXiv 1809.08887) publishes one folder: `train_spider.json`,
`train_others.json` and `dev.json` with `db_id`, `question` and `query` of every item, `tables.json`
with the schema of every database, and `database/<db_id>/<db_id>.sqlite`. The last two are looked
for beside the file of questions, or in `--spider`.
"""

import argparse
import json
import sys
from pathlib import Path


class BadFile(Exception):
    """A file that is not of Spider, or cannot be read."""


def read_items(path: Path, keys: tuple[str, ...]) -> list[dict]:
    """The objects of a JSON list, each with all of `keys`.

    Raises:
        BadFile: with file, item (counted from 0) and reason.
    """
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadFile(f"{path}: not valid JSON ({error})") from None
    if not isinstance(items, list):
        raise BadFile(f"{path}: not a list; is this a file of Spider?")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadFile(f"{path}, item {number}: not an object")
        for key in keys:
            if key not in item:
                raise BadFile(f"{path}, item {number}: no {key!r}; is this a file of Spider?")
    return items


def schemas(path: Path) -> dict[str, str]:
    """The schema of every database of `tables.json`, as `schema_text` writes it."""
    keys = ("db_id", "table_names_original", "column_names_original", "foreign_keys")
    texts = {}
    for number, item in enumerate(read_items(path, keys)):
        try:
            texts[item["db_id"]] = schema_text(item)
        except (IndexError, TypeError, ValueError) as error:
            raise BadFile(f"{path}, item {number}: not a schema ({error})") from None
    return texts


def schema_text(item: dict) -> str:
    """Tables with their columns, then the pairs of columns that join them.

    >>> print(schema_text({
    ...     "table_names_original": ["singer", "song"],
    ...     "column_names_original": [[-1, "*"], [0, "id"], [0, "name"], [1, "singer_id"]],
    ...     "foreign_keys": [[3, 1]],
    ... }))
    singer(id, name)
    song(singer_id)
    song.singer_id = singer.id
    """
    tables, columns = item["table_names_original"], item["column_names_original"]
    members: list[list[str]] = [[] for _ in tables]
    for table, column in columns:
        if table >= 0:
            members[table].append(column)
    lines = [f"{table}({', '.join(own)})" for table, own in zip(tables, members, strict=True)]
    for left, right in item["foreign_keys"]:
        ends = (f"{tables[table]}.{column}" for table, column in (columns[left], columns[right]))
        lines.append(" = ".join(ends))
    return "\n".join(lines)


def convert(source: Path, out: Path, spider: Path | None = None) -> int:
    """Write tasks; returns how many.

    Raises:
        BadFile: a file is missing or not of Spider, or an item's database is missing.
    """
    folder = spider or source.parent
    items = read_items(source, ("db_id", "question", "query"))
    known = schemas(folder / "tables.json")
    tasks = [
        to_task(item, f"{source}, item {number}", f"{source.stem}-{number}", known, folder)
        for number, item in enumerate(items)
    ]
    out.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return len(tasks)


def to_task(item: dict, where: str, name: str, known: dict[str, str], folder: Path) -> dict:
    """A task of Fulmen; the reference query is for the grader only."""
    database = item["db_id"]
    if database not in known:
        raise BadFile(f"{where}: database {database!r} is not in {folder / 'tables.json'}")
    file = folder / "database" / database / f"{database}.sqlite"
    if not file.is_file():
        raise BadFile(f"{where}: no file {file}")
    return {
        "id": name,
        "question": item["question"],
        "schema": known[database],
        "database": str(file.resolve()),
        "metadata": {"query": item["query"]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert files of Spider to tasks.")
    parser.add_argument("source", type=Path, help="train_spider.json, train_others.json, dev.json")
    parser.add_argument("--spider", type=Path, help="folder of tables.json and database/")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        written = convert(options.source, options.out, options.spider)
    except (BadFile, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{written} tasks written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
