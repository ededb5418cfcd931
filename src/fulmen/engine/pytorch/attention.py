"""Attention of many sequences at once over one key/value cache.

The arithmetic of the transformer stays the model's own: only the attention function is replaced,
through Hugging Face's attention interface. Inside `with serving(view):` (of the same thread) it
writes the new keys and values into the cache and attends over it. A forward pass may also bring an
attention of its own as a keyword (`with own_mask(): model(..., own_attention=…)`), as the learner
does for prefix trees. Everywhere else the model attends as it came: with what its family does
beyond the usual, sinks and caps among it.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from fulmen.schema.errors import ModelError

_CAME_WITH = {"fulmen": "sdpa", "fulmen-eager": "eager"}
"""The attention implementations that `prepare` gives models, and what plain passes of theirs use.
Families that sdpa cannot compute come as eager, which is written out in their own module."""

_REFUSED = ("s_aux", "position_bias")
"""Arguments of attention functions that change the result and that the cache does not know."""


class OwnAttention(Protocol):
    """Attention that a forward pass brings along, with the mask in it."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
        """(B, Hq, T, D) queries, (B, H, T, D) keys and values to (B, T, Hq, D)."""
        ...


@dataclass(slots=True)
class CacheView:
    """The part of the cache that one forward pass works on. P sequences, C new tokens each."""

    layers: Tensor
    """(2·L, S, H, T, D): keys of layer l at 2·l, values at 2·l + 1."""
    first: int
    """The sequences are at slots first … first + P − 1."""
    positions: Tensor
    """(P, C) int64, where the new tokens stand in their sequences."""
    length: int
    """Keys 0 … length − 1 can be seen by some query."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (P, H, C, D) keys and values; return all of them, (P, H, length, D)."""
        count = key.shape[0]
        slots = torch.arange(self.first, self.first + count, device=key.device)[:, None]
        for place, new in ((2 * layer, key), (2 * layer + 1, value)):
            self.layers[place][slots, :, self.positions] = new.transpose(1, 2)
        rows = slice(self.first, self.first + count)
        return (
            self.layers[2 * layer, rows, :, : self.length],
            self.layers[2 * layer + 1, rows, :, : self.length],
        )

    def mask(self, window: int | None) -> Tensor:
        """(P, 1, C, length) bool: which keys a query may see, causally and within the window."""
        if window not in self._masks:
            keys = torch.arange(self.length, device=self.positions.device)
            query = self.positions[:, None, :, None]
            seen = keys <= query
            if window is not None:
                seen &= keys > query - window
            self._masks[window] = seen
        return self._masks[window]

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """The mask as something to add to scores: 0 or −inf, (P, 1, C, length)."""
        # Masks are keyed by window; a bias lives beside its mask under the complementary key.
        key = -1 if window is None else -2 - window
        if key not in self._masks:
            hidden = ~self.mask(window)
            self._masks[key] = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[key].masked_fill_(hidden, float("-inf"))
        return self._masks[key]


_thread = threading.local()


@contextmanager
def serving(view: CacheView) -> Iterator[None]:
    """Forward passes of this thread work on the cache while the context is open."""
    _thread.view = view
    try:
        yield
    finally:
        _thread.view = None


@contextmanager
def own_mask() -> Iterator[None]:
    """Forward passes of this thread are not given a mask while the context is open: they bring an
    `own_attention` that knows who sees whom."""
    _thread.own_mask = True
    try:
        yield
    finally:
        _thread.own_mask = False


def prepare(model: PreTrainedModel) -> None:
    """Let a Hugging Face model be served.

    Raises:
        ModelError: its family does not use Hugging Face's attention interface, or attends in a way
            that the cache does not know; the model is as it was.
    """
    for name, original in _CAME_WITH.items():
        AttentionInterface.register(name, functools.partial(_attend, original))
        AttentionMaskInterface.register(name, functools.partial(_mask, original))
    config, before = model.config, _attention_of(model)
    # Looked up by the name of what would be needed: recurrent and linear-attention layers keep a
    # state that is no key/value cache, and per-layer sinks enter the softmax.
    unusual = [
        kind
        for kind in getattr(config.get_text_config(), "layer_types", None) or []
        if kind not in ("full_attention", "sliding_attention")
    ]
    if before not in _CAME_WITH:
        plain = before != "eager" and model._supports_sdpa
        model.set_attn_implementation("fulmen" if plain else "fulmen-eager")
    if unusual or config._attn_implementation not in _CAME_WITH:
        model.set_attn_implementation(_CAME_WITH.get(before, before))
        family = getattr(config, "model_type", type(model).__name__)
        what = f"{unusual[0]} layers" if unusual else "an attention of its own"
        raise ModelError(
            f"models of the family {family!r} have {what}, which the local engine cannot serve",
            hint="choose a family such as qwen3, qwen2, llama or mistral",
        )


def restore(model: PreTrainedModel) -> None:
    """Give a model back the attention that it came with, if `prepare` changed it."""
    name = _attention_of(model)
    model.set_attn_implementation(_CAME_WITH.get(name, name))


def _attention_of(model: PreTrainedModel) -> str:
    return model.config._attn_implementation or "eager"


def window_of(config: PretrainedConfig, layer: int) -> int | None:
    """How many tokens a layer's queries see, themselves included; None: all before them.

    Where the configuration has no kinds of layers, its window is that of all.

    >>> from transformers import MistralConfig, Qwen3Config
    >>> window_of(MistralConfig(sliding_window=9), 0), window_of(Qwen3Config(), 0)
    (9, None)
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds and kinds[layer] != "sliding_attention":
        return None
    return getattr(text, "sliding_window", None) or None


def _attend(
    original: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **keywords: object,
) -> tuple[Tensor, Tensor | None]:
    """(P, Hq, C, D) queries to (P, C, Hq, D) outputs."""
    view: CacheView | None = getattr(_thread, "view", None)
    if view is None:
        own: OwnAttention | None = keywords.pop("own_attention", None)  # type: ignore[assignment]
        if own is not None:
            return own(query, key, value, **keywords), None
        plain = _plain(original, type(module))
        return plain(module, query, key, value, attention_mask, **keywords)
    for name in _REFUSED:
        if keywords.get(name) is not None:
            raise ModelError(f"the model's attention wants {name!r}, which cannot be served")
    keys, values = view.write(module.layer_idx, key, value)  # type: ignore[arg-type]
    if "sliding_window" not in keywords:  # some layers leave it to the mask, which is not made here
        keywords["sliding_window"] = window_of(module.config, module.layer_idx)  # type: ignore[arg-type]
    window, cap = keywords["sliding_window"], keywords.get("softcap")
    scale = keywords.get("scaling") or query.shape[-1] ** -0.5
    assert window is None or isinstance(window, int)
    assert isinstance(scale, float)
    if query.shape[2] == 1 or isinstance(cap, float):
        mixed = _by_matmul(query, keys, values, view.bias(window, query.dtype), scale, cap)
    else:
        mixed = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=view.mask(window), scale=scale, enable_gqa=True
        )
    return mixed.transpose(1, 2).contiguous(), None


def _by_matmul(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, cap: object
) -> Tensor:
    """Attention as two batched products: on a CPU several times faster than masked SDPA for one
    query a sequence. (P, Hq, C, D) in and out; queries that share a key head are one product."""
    count, heads, columns, width = query.shape
    shared = keys.shape[1]
    grouped = query.reshape(count, shared, (heads // shared) * columns, width)
    scores = torch.matmul(grouped * scale, keys.transpose(2, 3))
    if isinstance(cap, float):
        scores = torch.tanh(scores / cap) * cap
    scores = scores.view(count, shared, heads // shared, columns, -1) + bias[:, :, None]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(count, shared, -1, weights.shape[-1]), values)
    return mixed.view(count, heads, columns, width)


@functools.cache
def _plain(original: str, kind: type[nn.Module]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that layers of a kind would call had the model been left as it came.

    Families name theirs in the module of their layers, where the layers themselves look it up.

    Raises:
        ModelError: this one does not.
    """
    names: dict[str, Any] = inspect.unwrap(kind.forward).__globals__
    registered = names.get("ALL_ATTENTION_FUNCTIONS", AttentionInterface())
    found = registered.get(original, names.get("eager_attention_forward"))
    if found is None:
        raise ModelError(
            f"the attention of {kind.__name__} is not to be found in {kind.__module__}"
        )
    return found


def _mask(original: str, *args: object, **keywords: object) -> Tensor | None:
    """No mask where the cache or the caller has its own; elsewhere, that of the original."""
    if getattr(_thread, "view", None) is not None or getattr(_thread, "own_mask", False):
        return None
    return AttentionMaskInterface()[original](*args, **keywords)
