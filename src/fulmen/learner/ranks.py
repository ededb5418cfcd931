"""The processes that train one policy together, as `torchrun` starts them, and how they talk.

Tensors of the training go over the group that PyTorch uses by itself (NCCL on GPUs, gloo on CPUs).
What the first process tells the others goes over a group of its own, on which they may wait for as
long as agents take; it is bytes, and nobody unpickles them.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fulmen.schema.errors import EngineError

_PATIENCE = timedelta(days=30)
"""How long a process waits for the next order: rollouts of a step may take hours."""
_STEP = timedelta(hours=1)
"""How long it waits within a step, while the first trains a critic or writes a model, say."""


class Ranks:
    """This process among `size` of them. All methods are called by all processes at once."""

    def __init__(self, device: torch.device) -> None:
        """Join the others, each with a device of the same kind."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Both: parts of weights may be kept in the CPU's memory, and are summed where they are.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_STEP)
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.size,))
        talk = dist.new_group(backend="gloo", timeout=_PATIENCE)
        assert isinstance(talk, dist.ProcessGroup), "this process is in the group"
        self._talk = talk

    @property
    def first(self) -> bool:
        """Whether this is the process that runs everything else, too."""
        return self.rank == 0

    def broadcast(self, data: bytes = b"") -> bytes:
        """What the first process gives, in every process.

        Raises:
            EngineError: one of them has ended without leaving.
        """
        try:
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, group=self._talk)
            payload = _tensor(data) if self.first else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(payload, 0, group=self._talk)
        except RuntimeError as error:
            raise EngineError(
                f"a process of the run has ended before process {self.rank}"
            ) from error
        return payload.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """What each process gives, in every process, by rank."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._talk)
        longest = max(int(size) for size in sizes)
        padded = _tensor(data.ljust(longest, b"\0"))
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self._talk)
        return [
            piece[: int(size)].numpy().tobytes() for piece, size in zip(found, sizes, strict=True)
        ]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def _tensor(data: bytes) -> Tensor:
    """Bytes as a vector; a copy, because a tensor must be writable. Empty ones, too."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
