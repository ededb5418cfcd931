"""Named tensors on disk, in as many pieces as there are processes, and back into any other number.

The format is PyTorch's distributed checkpoint over safetensors files: each process writes what it
holds, and reads what it needs, whoever wrote that. Nothing is pickled.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fulmen.schema.errors import ModelError

STATE, PROGRESS = "state", "learner.json"
"""Within a checkpoint: the folder of tensors, and how far the learner has come."""


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Write tensors into a folder that is not there yet; all processes at once, the same names,
    or this one `alone`."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _alone():
        save(_flat(tensors), storage_writer=writer, no_dist=alone or not dist.is_initialized())


def load_tensors(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Read tensors in place; all processes at once, or this one `alone`.

    Raises:
        ModelError: one of them is not there, or has another shape.
    """
    saved = saved_shapes(folder)
    wanted = _flat(tensors)
    for name, tensor in wanted.items():
        here, there = list(tensor.shape), list(saved.get(name, ()))
        if name not in saved:
            raise ModelError(f"{folder} belongs to another model: it has no {name}")
        if here != there:
            raise ModelError(
                f"{folder} belongs to another model: {name} is {here} here and {there} there"
            )
    reader = HuggingFaceStorageReader(str(folder))
    with _alone():
        load(wanted, storage_reader=reader, no_dist=alone or not dist.is_initialized())


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names of what a folder holds, each with its shape; empty if there is no such folder."""
    if not folder.is_dir():
        return {}
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return {
        name: tuple(found.size)
        for name, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }


@contextmanager
def _alone() -> Iterator[None]:
    """PyTorch warns of a single process, even if told that there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Single numbers as vectors of one, which share their memory: the format has no others."""
    return {name: tensor if tensor.ndim else tensor.view(1) for name, tensor in tensors.items()}
