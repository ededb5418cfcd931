"""Attention over prefix trees: the same function for a model as its own, at the cost of the tree.

Two ways to the same numbers: tiles of dense products, with nothing of the size of the scores kept
between forward and backward pass; and, on CUDA, FlexAttention with the tree as block mask.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from fulmen.engine.pytorch.attention import OwnAttention
from fulmen.learner.blocks import block_mask
from fulmen.learner.tiles import Tiles, tile
from fulmen.learner.trees import Forest
from fulmen.schema.errors import ModelError

_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention functions that change the result and that trees do not know."""


class TreeAttention(OwnAttention, Protocol):
    """What a forward pass over a forest puts in the place of the model's attention; B is 1."""

    layers: int
    """How many layers have used it: a model that ignores it is no model for trees."""


def tree_attention(forest: Forest, device: torch.device) -> TreeAttention:
    """The way that is fast on the device."""
    return FlexTree(forest, device) if device.type == "cuda" else TiledTree(forest, device)


class TiledTree:
    """Attention of each tile as dense products; any device."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.layers = 0
        self._tiles = tile(forest, device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
        scale, window = _arguments(query, keywords)
        self.layers += 1
        flat = [x[0].transpose(0, 1).contiguous() for x in (query * scale, key, value)]
        return _Tiled.apply(*flat, self._tiles, window)[None]  # type: ignore[index]


class FlexTree:
    """FlexAttention with the forest as block mask; compiled, it skips what no query sees."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.layers = 0
        self._mask = cache(partial(block_mask, forest, device=device))
        # Without compilation it writes all T × T scores down, which is only good for tests.
        self._flex = flex_attention if device.type == "cpu" else _compiled_flex()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
        scale, window = _arguments(query, keywords)
        self.layers += 1
        mixed = self._flex(
            query, key, value, block_mask=self._mask(window), scale=scale, enable_gqa=True
        )
        return mixed.transpose(1, 2)


@cache
def _compiled_flex() -> Any:  # noqa: ANN401 - torch.compile keeps no signature
    return torch.compile(flex_attention, dynamic=True)


def _arguments(query: Tensor, keywords: dict[str, object]) -> tuple[float, int | None]:
    """Scale and window of a layer.

    Raises:
        ModelError: it wants something that changes its attention in a way trees do not know.
    """
    for name in _UNKNOWN:
        if keywords.get(name) is not None:
            raise ModelError(f"the model's attention wants {name!r}")
    scale, window = keywords.get("scaling"), keywords.get("sliding_window")
    assert scale is None or isinstance(scale, float)
    assert window is None or isinstance(window, int)
    return (query.shape[-1] ** -0.5 if scale is None else scale), window


class _Tiled(torch.autograd.Function):
    """softmax(q kᵀ) v tile by tile. Keeps inputs and output, and makes the weights again in the
    backward pass: with P the weights and O the output, dS = P ∘ (dO vᵀ − rowsum(dO ∘ O))
    (FlashAttention, arXiv 2205.14135, section B.2)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Sequence[Tiles],
        window: int | None,
    ) -> Tensor:
        """(T, Hq, D) scaled queries, (T, H, D) keys and values to (T, Hq, D)."""
        output = query.new_empty(len(query) + 1, *query.shape[1:])
        for one in tiles:
            weights = _weights(query, key, one, window)
            mixed = torch.bmm(weights.to(value.dtype), _heads_of(value, one.keys))
            output.index_copy_(0, one.queries.flatten(), _flat(mixed, one, query.shape))
        ctx.save_for_backward(query, key, value, output[:-1])
        ctx.tiles, ctx.window = tiles, window
        return output[:-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: ANN401 - torch's
        query, key, value, output = ctx.saved_tensors
        rows = (gradient * output).sum(-1, keepdim=True, dtype=torch.float32)  # (T, Hq, 1)
        rows, gradient = _padded_row(rows), _padded_row(gradient)
        d_query = query.new_empty(len(query) + 1, *query.shape[1:])
        d_key = torch.zeros(key.shape, dtype=torch.float32, device=key.device)
        d_value = torch.zeros_like(d_key)
        for one in ctx.tiles:
            shared = key.shape[1]
            weights = _weights(query, key, one, ctx.window)
            above = _grouped(gradient, one.queries, shared)
            keys, values = _heads_of(key, one.keys), _heads_of(value, one.keys)
            _collect(d_value, one.keys, torch.bmm(weights.to(above.dtype).transpose(1, 2), above))
            scores = torch.bmm(above, values.transpose(1, 2)).float()
            scores = scores.sub_(_grouped(rows, one.queries, shared)).mul_(weights).to(query.dtype)
            _collect(
                d_key,
                one.keys,
                torch.bmm(scores.transpose(1, 2), _queries_of(query, one, shared)),
            )
            d_query.index_copy_(
                0, one.queries.flatten(), _flat(torch.bmm(scores, keys), one, query.shape)
            )
        return d_query[:-1], d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _weights(query: Tensor, key: Tensor, one: Tiles, window: int | None) -> Tensor:
    """(B · H, G · Q, K) float32 attention weights; G query heads share a key head."""
    shared = key.shape[1]
    scores = torch.bmm(
        _queries_of(query, one, shared), _heads_of(key, one.keys).transpose(1, 2)
    ).float()
    count, length = one.keys.shape
    hidden = one.hidden(window)  # (B, Q, ≤ K)
    view = scores.view(count, shared, -1, one.queries.shape[1], length)
    view[..., length - hidden.shape[-1] :].masked_fill_(hidden[:, None, None], float("-inf"))
    return torch.softmax(scores, dim=-1)


def _queries_of(query: Tensor, one: Tiles, shared: int) -> Tensor:
    # A padded query is a copy of the last one: its weights are finite, and nobody reads them.
    return _grouped(query, one.queries.clamp(max=len(query) - 1), shared)


def _grouped(values: Tensor, places: Tensor, shared: int) -> Tensor:
    """(T, Hq, D) at (B, Q) places to (B · H, G · Q, D): heads that share keys lie together."""
    count, columns = places.shape
    found = values.index_select(0, places.flatten())
    found = found.view(count, columns, shared, -1, values.shape[-1]).permute(0, 2, 3, 1, 4)
    return found.reshape(count * shared, -1, values.shape[-1])


def _heads_of(values: Tensor, places: Tensor) -> Tensor:
    """(T, H, D) at (B, K) places to (B · H, K, D)."""
    return _grouped(values, places, values.shape[1])


def _flat(mixed: Tensor, one: Tiles, shape: torch.Size) -> Tensor:
    """(B · H, G · Q, D) back to (B · Q, Hq, D)."""
    count, columns = one.queries.shape
    heads, width = shape[1:]
    return mixed.view(count, heads, columns, width).transpose(1, 2).reshape(-1, heads, width)


def _collect(total: Tensor, places: Tensor, parts: Tensor) -> None:
    """Add (B · H, K, D) parts to (T, H, D) at (B, K) places."""
    count, length = places.shape
    parts = parts.view(count, -1, length, parts.shape[-1]).transpose(1, 2)
    total.index_add_(0, places.flatten(), parts.reshape(-1, *total.shape[1:]).to(total.dtype))


def _padded_row(values: Tensor) -> Tensor:
    """One more row of zeros, which is what padded queries read: they have no gradient."""
    return torch.cat([values, values.new_zeros(1, *values.shape[1:])])
