"""The process set right for PyTorch on a CPU, before PyTorch is there.

Two defaults cost a factor each. glibc returns large blocks to the kernel at every `free` and
faults them in again at the next `malloc`; a training step of a small model takes five times as
long as with memory that is kept. And OpenMP's threads spin at barriers, so that two busy processes
on two cores bring each other to a halt.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_KEEP_BELOW = 2**31 - 1
_TOP_PAD = 64 * 2**20
"""Bytes asked of the kernel at once; more would only raise the footprint of small runs."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was changed."""

    malloc: bool
    """glibc keeps freed memory."""
    passive_waiting: bool
    """OpenMP threads sleep at barriers."""
    threads: int


def place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Rank of this process and number of processes, as torchrun says; (0, 1) without it.

    >>> place({"RANK": "1", "WORLD_SIZE": "2"}), place({})
    ((1, 2), (0, 1))
    """
    return int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))


def environment_for(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that computes with so many threads; what the user has set stays.

    >>> environment_for(2, {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"]
    'ACTIVE'
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    } | dict(environment)


def prepare_process(*, threads: int) -> Prepared:
    """Keep memory, wait passively, and use so many threads.

    Call it before importing torch: OpenMP reads its setting when it is loaded. Settings that the
    user made in the environment stay.
    """
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Prepared(
        malloc=_keep_memory(),
        passive_waiting=os.environ["OMP_WAIT_POLICY"].upper() == "PASSIVE",
        threads=threads,
    )


def _keep_memory() -> bool:
    """Tell glibc to keep what is freed; False where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # One arena: the engine's and the learner's threads reuse each other's blocks.
    changes = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _KEEP_BELOW),
        (_M_TOP_PAD, _TOP_PAD),
    )
    return all(mallopt(name, value) == 1 for name, value in changes)
