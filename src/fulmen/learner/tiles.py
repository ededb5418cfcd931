"""A forest's attention as few dense products: who looks at whom.

Every segment attends to its ancestors and to itself, so the work is the sum over segments of length
× depth. Segments are cut into tiles of queries, and tiles of similar shape are padded and computed
together.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulmen.learner.trees import Forest, Ints

_QUERIES = 64
"""Queries of a tile: fewer save keys that none of them may see, more save products."""
_SLACK = 1.3
"""Tiles that are padded to one shape differ by no more than this in either direction."""
_AREA = 1 << 17
"""Scores of one product, for each head: what it needs at once, beside what is kept."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """B tiles of Q queries and K keys each."""

    queries: Tensor
    """(B, Q) int64, positions; padding is one past the last position of the forest."""
    depths: Tensor
    """(B, Q) int64, of the queries; 0 where padded."""
    keys: Tensor
    """(B, K) int64, positions by rising depth, 0, 1, …; padding, at the end, is position 0."""
    seen: int
    """Keys of depths below this are ancestors of all queries."""

    def hidden(self, window: int | None) -> Tensor:
        """(B, Q, K − `seen`) bool, or (B, Q, K) with a window: keys that a query may not see."""
        first = 0 if window is not None else self.seen
        keys = torch.arange(first, self.keys.shape[1], device=self.keys.device)
        hidden = keys > self.depths[..., None]
        if window is not None:
            hidden |= keys <= self.depths[..., None] - window
        return hidden


class _Tile(NamedTuple):
    queries: Ints
    path: Ints
    """From the root to the last query."""

    @property
    def shape_class(self) -> tuple[int, int]:
        """Tiles of one class have about equally many queries; sorted by keys within it."""
        return (math.ceil(math.log(len(self.queries), _SLACK)), len(self.path))


def tile(forest: Forest, device: torch.device) -> list[Tiles]:
    """Cut a forest's attention into tiles; every position is a query of exactly one."""
    groups: list[list[_Tile]] = []
    for one in sorted(_tiles(forest), key=lambda one: one.shape_class):
        if groups and _fits(groups[-1], one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return [_padded(group, len(forest.ids), device) for group in groups]


def _tiles(forest: Forest) -> Iterator[_Tile]:
    for segment, path in zip(forest.segments, forest.paths(), strict=True):
        above = len(path) - (segment.end - segment.start)
        for start in range(above, len(path), _QUERIES):
            end = min(start + _QUERIES, len(path))
            yield _Tile(path[start:end], path[:end])


def _fits(group: Sequence[_Tile], one: _Tile) -> bool:
    queries, keys = max(len(t.queries) for t in group), len(one.path)
    return (
        group[0].shape_class[0] == one.shape_class[0]
        and keys <= _SLACK * len(group[0].path) + 8
        and (len(group) + 1) * max(queries, len(one.queries)) * keys <= _AREA
    )


def _padded(group: Sequence[_Tile], size: int, device: torch.device) -> Tiles:
    queries = np.full((len(group), max(len(one.queries) for one in group)), size)
    depths = np.zeros_like(queries)
    keys = np.zeros((len(group), max(len(one.path) for one in group)), dtype=np.int64)
    for row, one in enumerate(group):
        queries[row, : len(one.queries)] = one.queries
        depths[row, : len(one.queries)] = np.arange(len(one.path) - len(one.queries), len(one.path))
        keys[row, : len(one.path)] = one.path
    seen = min(len(one.path) - len(one.queries) for one in group)
    return Tiles(
        *(torch.as_tensor(array, device=device) for array in (queries, depths, keys)), seen=seen
    )
