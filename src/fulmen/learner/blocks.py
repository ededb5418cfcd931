"""A forest as FlexAttention has it: which blocks of keys a block of queries looks at.

PyTorch finds that out by writing all T × T pairs down, gigabytes for a long forest. Here it follows
from where subtrees end: for each block of queries one look at the keys before it.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from fulmen.learner.trees import Forest, Ints

_SIZE = 128
"""Queries and keys of a block, as FlexAttention's kernels like them."""

_Table = npt.NDArray[np.bool_]


def block_mask(
    forest: Forest, window: int | None, device: torch.device, *, size: int = _SIZE
) -> BlockMask:
    """The mask of T queries and T keys: each position sees its ancestors and itself, with a window
    only those fewer than `window` tokens before it."""
    ends = torch.as_tensor(forest.subtree_ends(), device=device)
    depths = torch.as_tensor(forest.depths, device=device)

    def visible(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # In depth-first order, those below a key are the run from it to the end of its subtree.
        seen = (key <= query) & (query < ends[key])
        return seen if window is None else seen & (depths[query] - depths[key] < window)

    some, whole = _tables(forest, window, size)
    some_count, some_places = _listed(some & ~whole, device)
    whole_count, whole_places = _listed(whole, device)
    return BlockMask.from_kv_blocks(
        some_count,
        some_places,
        whole_count,
        whole_places,
        BLOCK_SIZE=size,
        mask_mod=visible,
        seq_lengths=(len(forest.ids), len(forest.ids)),
    )


def _tables(forest: Forest, window: int | None, size: int) -> tuple[_Table, _Table]:
    """(R, R) for R blocks of queries and of keys: where any pair is visible, and where all are."""
    ends, depths = forest.subtree_ends(), forest.depths
    count = len(ends)
    starts = range(0, count, size)
    first_ends, least_depths = (np.minimum.reduceat(x, starts) for x in (ends, depths))
    some, whole = (np.zeros((len(starts), len(starts)), dtype=np.bool_) for _ in range(2))
    for row, start in enumerate(starts):
        end = min(start + size, count)
        some[row, _above(ends, depths, start, end, window) // size] = True
        some[row, row] = True
        if end - start == size:  # rows beyond the last position see nothing
            whole[row, :row] = first_ends[:row] >= end
            if window is not None:
                whole[row, :row] &= depths[start:end].max() - least_depths[:row] < window
    return some, whole


def _above(ends: Ints, depths: Ints, start: int, end: int, window: int | None) -> Ints:
    """Which keys before a block, start … end − 1, are seen by any of its queries."""
    # A key seen by any is seen by the first, as far as there is no window: its run goes on to here.
    keys = np.flatnonzero(ends[:start] > start)
    if window is None:
        return keys
    shallowest = np.minimum.accumulate(depths[start:end])
    nearest = shallowest[np.minimum(ends[keys], end) - 1 - start]
    return keys[nearest - depths[keys] < window]


def _listed(table: _Table, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row by row, how many are true, and their columns, which come first: (1, 1, R), (1, 1, R, R)
    int32."""
    columns = np.argsort(~table, axis=-1, kind="stable")
    return (
        torch.as_tensor(table.sum(-1), dtype=torch.int32, device=device)[None, None],
        torch.as_tensor(columns, dtype=torch.int32, device=device)[None, None],
    )
