"""Rows packed into micro-batches of bounded size, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fulmen.learner.rows import Row


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass needs. B rows, T positions, N trained tokens."""

    ids: Tensor
    """(B, T) int64, right-padded; padding comes after every real token of its row, so that causal
    attention needs no mask."""
    rows: Tensor
    """(N,) int64, row of each trained token."""
    positions: Tensor
    """(N,) int64, position of each trained token; its prediction is made one before."""
    advantages: Tensor
    """(N,) float32."""
    logprobs: Tensor
    """(N,) float32, behaviour log-probabilities."""
    temperatures: Tensor
    """(N,) float32, > 0."""
    completions: Sequence[tuple[str, tuple[int, ...]]] = ()
    """The N trained tokens, call by call, each with its grammar; empty: none has one."""

    @property
    def targets(self) -> Tensor:
        """(N,) int64, the trained tokens themselves."""
        return self.ids[self.rows, self.positions]


def pack(rows: Sequence[Row], max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Group rows of similar length so that B × T stays within `max_tokens`.

    A single row longer than the bound gets a micro-batch of its own. The order of rows does not
    change the sum of losses, so they are sorted by length to save padding.
    """
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if batches and (len(batches[-1]) + 1) * len(row.ids) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_tensors(batch, device) for batch in batches]


def _tensors(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    ids = np.zeros((len(rows), max(len(row.ids) for row in rows)), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = row.ids

    def column(values: list[list[float]] | list[list[int]], dtype: torch.dtype) -> Tensor:
        flat = np.concatenate([np.asarray(v) for v in values])
        return torch.as_tensor(flat, dtype=dtype, device=device)

    counts = [len(row.positions) for row in rows]
    return MicroBatch(
        ids=torch.as_tensor(ids, device=device),
        rows=torch.as_tensor(np.repeat(np.arange(len(rows)), counts), device=device),
        positions=column([row.positions for row in rows], torch.int64),
        advantages=column([row.advantages for row in rows], torch.float32),
        logprobs=column([row.logprobs for row in rows], torch.float32),
        temperatures=column([row.temperatures for row in rows], torch.float32),
        completions=[completion for row in rows for completion in row.completions],
    )
