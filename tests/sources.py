"""The same rows as files of every format, laid out as their usual writers lay them out."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet


def write_jsonl(rows: Sequence[Any], file: Path) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def write_csv(rows: Sequence[Mapping[str, str]], file: Path) -> Path:
    with file.open("w", encoding="utf-8", newline="") as open_file:
        separator = "\t" if file.suffix == ".tsv" else ","
        writer = csv.DictWriter(open_file, list(rows[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_parquet(table: pa.Table, file: Path) -> Path:
    parquet.write_table(table, file, row_group_size=3)
    return file


def write_data_set(
    table: pa.Table, folder: Path, *, shards: int = 1, columns: Sequence[str] | None = None
) -> Path:
    """What `Dataset.save_to_disk` of datasets 5.2 leaves: streams, their list, a description."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    if not table.num_rows:
        names = []
    size = -(-table.num_rows // shards)
    for number, name in enumerate(names):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table.slice(number * size, size), max_chunksize=2)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "de4c3282af1023e9",
        "_format_columns": columns,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return folder


def write_splits(tables: Mapping[str, pa.Table], folder: Path) -> Path:
    """What `DatasetDict.save_to_disk` leaves: a data set for each split, and their list."""
    for name, table in tables.items():
        write_data_set(table, folder / name)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(tables)}))
    return folder
