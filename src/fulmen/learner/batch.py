"""Credited calls laid out for the model: micro-batches of bounded size, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fulmen.learner.attention import TreeAttention, tree_attention
from fulmen.learner.chains import Chains, chain
from fulmen.learner.trees import Forest, Lesson, plant
from fulmen.schema.records import Credited

Layout = Literal["auto", "tree", "chain"]
"""Prefix trees; plain sequences, for models that cannot have trees; or whichever costs less."""


_WORTH = 1.25
"""Trees are taken where they save a fifth of the positions, padding of chains included: attention
over tiles costs more than over plain rows, and that is where the two break even on a CPU
(`make bench-learner`)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass needs: B rows (1 of a forest) of T positions, N sampled tokens of M
    calls.

    A call's tokens are side by side. Calls that share tokens have a term for each.
    """

    ids: Tensor
    """(B, T) int64."""
    depths: Tensor
    """(B, T) int64, where a token stands in its own sequence."""
    attention: TreeAttention | None
    """None: causal, row by row; padding comes last in its row, so it needs no mask."""
    before: Tensor
    """(N,) int64, for each sampled token the position (of B · T) whose output predicts it."""
    targets: Tensor
    """(N,) int64, the sampled tokens themselves."""
    advantages: Tensor
    """(N,) float32."""
    weights: Tensor
    """(N,) float32, of each token's loss in the sum."""
    logprobs: Tensor
    """(N,) float32, as the engine recorded them."""
    temperatures: Tensor
    """(N,) float32, > 0."""
    calls: Tensor
    """(N,) int64, 0 … M−1, rising."""
    items: Sequence[Credited]
    """The M calls."""
    counts: bool = True
    """False: computed only because other processes compute; weighs nothing, is in no metric."""

    @property
    def positions(self) -> int:
        """How many positions are computed, padding included."""
        return self.ids.numel()


def lay_out(
    items: Sequence[Credited],
    weights: Sequence[float],
    *,
    layout: Layout,
    max_tokens: int,
    device: torch.device,
) -> list[MicroBatch]:
    """Put calls into micro-batches; each call is in one, as a whole.

    Args:
        items: M calls.
        weights: (M,) of each call's tokens in the loss.
        layout: how what they share is computed.
        max_tokens: positions of a micro-batch, unless one call alone has more.
        device: of the tensors.

    Raises:
        DataError: a call has an empty prompt.
    """
    weight_of = {id(item): weight for item, weight in zip(items, weights, strict=True)}
    forests = plant(items, max_tokens) if layout != "chain" else []
    chains = chain(items, max_tokens) if layout != "tree" else []
    if layout == "auto":
        saved = sum(one.ids.size for one in chains) - _WORTH * sum(len(one.ids) for one in forests)
        layout = "tree" if saved > 0 else "chain"
    if layout == "tree":
        return [_of_forest(forest, weight_of, device) for forest in forests]
    return [_of_chains(one, weight_of, device) for one in chains]


def _of_forest(forest: Forest, weight_of: dict[int, float], device: torch.device) -> MicroBatch:
    return _tensors(
        ids=forest.ids[None],
        depths=forest.depths[None],
        attention=tree_attention(forest, device),
        lessons=forest.lessons,
        weight_of=weight_of,
        device=device,
    )


def _of_chains(chains: Chains, weight_of: dict[int, float], device: torch.device) -> MicroBatch:
    return _tensors(
        ids=chains.ids,
        depths=np.broadcast_to(np.arange(chains.ids.shape[1]), chains.ids.shape).copy(),
        attention=None,
        lessons=chains.lessons,
        weight_of=weight_of,
        device=device,
    )


def _tensors(
    *,
    ids: np.ndarray,
    depths: np.ndarray,
    attention: TreeAttention | None,
    lessons: Sequence[Lesson],
    weight_of: dict[int, float],
    device: torch.device,
) -> MicroBatch:
    items = [lesson.item for lesson in lessons]
    counts = [len(lesson.before) for lesson in lessons]

    def column(values: Sequence[np.ndarray | Sequence[float]], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.concatenate(values), dtype=dtype, device=device)

    def repeated(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.repeat(values, counts), dtype=dtype, device=device)

    return MicroBatch(
        ids=torch.as_tensor(ids, device=device),
        depths=torch.as_tensor(depths, device=device),
        attention=attention,
        before=column([lesson.before for lesson in lessons], torch.int64),
        targets=column([item.transition.completion_ids for item in items], torch.int64),
        advantages=column([_advantages(item) for item in items], torch.float32),
        weights=repeated([weight_of[id(item)] for item in items], torch.float32),
        logprobs=column([item.transition.logprobs for item in items], torch.float32),
        temperatures=repeated([item.transition.temperature for item in items], torch.float32),
        calls=repeated(list(range(len(items))), torch.int64),
        items=items,
    )


def _advantages(item: Credited) -> Sequence[float]:
    """One for each completion token."""
    return item.token_advantages or [item.advantage] * len(item.transition.completion_ids)
