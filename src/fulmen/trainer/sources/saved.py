"""Folders that `save_to_disk` of Hugging Face's `datasets` wrote; the package itself is not needed.

A data set is a `state.json`, which names Arrow streams in their order. Several are in a folder each
beside a `dataset_dict.json`, which names the folders. Read from files of datasets 5.2.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fulmen.schema.errors import DataError
from fulmen.trainer.sources.columns import batch_rows, need_pyarrow
from fulmen.trainer.sources.rows import Row, one_line

T = TypeVar("T")

_STATE = "state.json"
_SPLITS = "dataset_dict.json"


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    """What a data set is made of; the rest of the file is not about its rows."""

    data_files: list[_File] = msgspec.field(name="_data_files")
    columns: list[str] | None = msgspec.field(name="_format_columns", default=None)
    """Those that were chosen with `set_format`; None: all."""


class _Splits(msgspec.Struct):
    splits: list[str]


def saved_rows(folder: Path, split: str | None) -> Iterator[Row]:
    """Rows of a saved data set, or of one split of several.

    Raises:
        DataError: the folder holds no data set or no such split, pyarrow is not installed, a file
            is missing or damaged, or a value is no JSON.
    """
    folder = _data_set(folder, split)
    state = _read(folder / _STATE, _State)
    arrow = need_pyarrow(folder)
    number = 1
    for file in state.data_files:
        path = folder / file.filename
        try:
            with arrow.memory_map(str(path)) as mapped, arrow.ipc.open_stream(mapped) as batches:
                for row in batch_rows(_chosen(batches, state), str(folder), first=number):
                    yield row
                    number += 1
        except (arrow.ArrowException, OSError) as error:
            raise DataError(
                f"{path}: cannot be read as an Arrow stream ({one_line(error)})",
                hint="save the data set anew",
            ) from None


def _chosen(batches: Any, state: _State) -> Iterator[Any]:  # noqa: ANN401 - pyarrow's reader
    for batch in batches:
        yield batch if state.columns is None else batch.select(state.columns)


def _data_set(folder: Path, split: str | None) -> Path:
    if (folder / _SPLITS).is_file():
        splits = _read(folder / _SPLITS, _Splits).splits
        if split in splits:
            return folder / split
        wrong = "holds splits" if split is None else f"has no split {split!r}"
        raise DataError(
            f"{folder}: {wrong} (there are: {', '.join(splits)})",
            hint=f"write {folder}:{next(iter(splits), '…')}",
        )
    if not (folder / _STATE).is_file():
        raise DataError(
            f"{folder}: holds no data set ({_STATE} is not there)",
            hint="give a file, or a folder written by save_to_disk of `datasets`",
        )
    if split is not None:
        raise DataError(f"{folder}: holds one data set, no splits", hint=f"write {folder}")
    return folder


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({one_line(error)})", hint="save the data set anew"
        ) from None
