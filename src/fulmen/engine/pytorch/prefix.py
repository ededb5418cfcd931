"""Keys and values of prefixes seen before, in blocks of 16 tokens.

A block is known by its parent block and its own tokens, compared exactly: a trie. A request copies
the blocks of its longest known prefix into its slot and computes only the rest; so the rollouts of
a group compute their prompt once, and the next turn of a conversation only what is new. Each
adapter of a model has a trie of its own: the same tokens have other keys and values under another.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 16
"""Tokens in a block: small prompts still share, and looking up costs little."""

Adapter = str | None
BlockKey = tuple[int | Adapter, tuple[int, ...]]
"""The block before it, by its id, or of a first one the adapter; and its tokens."""


class PrefixCache:
    """A bounded set of blocks; the least recently used ones give way."""

    def __init__(
        self, *, heads: int, width: int, planes: int, max_bytes: int, like: Tensor
    ) -> None:
        """`planes` is twice the number of layers; `like` gives dtype and device."""
        each = planes * heads * BLOCK * width * like.element_size()
        self.capacity = max(1, max_bytes // each)
        self._shape = (planes, heads, BLOCK, width)
        self._like = like
        self._blocks = like.new_empty((0, *self._shape))
        self._places: OrderedDict[BlockKey, tuple[int, int, Adapter]] = OrderedDict()
        """Key to (block id, place in the storage, adapter); least recently used first."""
        self._free: list[int] = []
        """Places below the number of blocks that hold none."""
        self._next_id = 0

    def match(
        self, tokens: Sequence[int], adapter: Adapter = None
    ) -> tuple[list[int], BlockKey | None]:
        """Places of the blocks that begin `tokens`, and the key of the first full block missing.

        The last token is never matched: its logits have to be computed.
        """
        parent: int | Adapter = adapter
        missing: BlockKey | None = None
        chain: list[BlockKey] = []
        places: list[int] = []
        for start in range(0, len(tokens) - BLOCK, BLOCK):
            key = (parent, tuple(tokens[start : start + BLOCK]))
            if key not in self._places:
                missing = key
                break
            chain.append(key)
            parent, place, _ = self._places[key]
            places.append(place)
        self._touch(chain)
        return places, missing

    def load(self, places: Sequence[int], slot: Tensor) -> None:
        """Copy blocks to the start of a slot, (planes, H, T, D)."""
        if places:
            found = self._blocks[torch.as_tensor(places, device=slot.device)]
            planes, heads, _, width = self._shape
            slot[:, :, : len(places) * BLOCK] = found.permute(1, 2, 0, 3, 4).reshape(
                planes, heads, len(places) * BLOCK, width
            )

    def store(self, tokens: Sequence[int], slot: Tensor, adapter: Adapter = None) -> None:
        """Keep the full blocks of `tokens`, whose keys and values stand in the slot."""
        parent: int | Adapter = adapter
        chain: list[BlockKey] = []
        # A chain longer than the whole capacity would push out its own beginning.
        count = min(len(tokens) // BLOCK, self.capacity)
        for start in range(0, count * BLOCK, BLOCK):
            key = (parent, tuple(tokens[start : start + BLOCK]))
            if key in self._places:
                self._places.move_to_end(key)
            else:
                place = self._free_place()
                self._blocks[place] = slot[:, :, start : start + BLOCK]
                self._places[key] = (self._next_id, place, adapter)
                self._next_id += 1
            parent = self._places[key][0]
            chain.append(key)
        self._touch(chain)

    def clear(self, adapter: Adapter = None) -> None:
        """Forget everything of an adapter: its weights have changed."""
        for key in [key for key, found in self._places.items() if found[2] == adapter]:
            self._free.append(self._places.pop(key)[1])

    def _touch(self, chain: list[BlockKey]) -> None:
        """Mark as used, the end first: without its beginning a chain's end cannot be found."""
        for key in reversed(chain):
            self._places.move_to_end(key)

    def _free_place(self) -> int:
        if self._free:
            return self._free.pop()
        used = len(self._places)
        if used == self.capacity:
            return self._places.popitem(last=False)[1][1]
        if used == len(self._blocks):
            size = min(self.capacity, max(64, 2 * used))
            grown = self._like.new_empty((size, *self._shape))
            grown[:used] = self._blocks
            self._blocks = grown
        return used
