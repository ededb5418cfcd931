"""Log-probability and entropy of given tokens, without the logits of all of them at once.

N rows of a vocabulary of V are the largest tensor of a training step by far. So rows are worked on
in chunks: the forward pass keeps two numbers a row, and the backward pass computes a chunk's logits
again. That costs one more product with the output embedding; a single chunk costs nothing more.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fulmen.engine.adapted import as_chosen
from fulmen.engine.grammar import Mask
from fulmen.engine.pytorch.masks import forbid

MAX_LOGITS = 2**25
"""Logits in memory at once: 128 MiB in float32, and about four times that in the backward pass."""


class Predictions(NamedTuple):
    """What a model makes of the context before each of N tokens, up to its logits."""

    hidden: Tensor
    """(N, H), last hidden state of the position before the token."""
    project: Callable[[Tensor], Tensor]
    """(R, H) to (R, V) logits, as the model's own forward does; the same ones every time."""
    vocabulary: int
    """V."""


class TokenScores(NamedTuple):
    """Per trained token, N of them."""

    logprobs: Tensor
    """(N,) float32, nats, at the temperature the token was sampled with."""
    entropy: Tensor
    """(N,) float32, nats, of the distribution it was sampled from."""
    values: Tensor | None = None
    """(N,) float32, what a value head foresees just before it; None: there is no head."""


def token_scores(
    predictions: Predictions,
    targets: Tensor,
    temperatures: Tensor,
    *,
    masks: Sequence[Mask | None] = (),
    entropy_gradient: bool = False,
    max_logits: int = MAX_LOGITS,
) -> TokenScores:
    """Score N tokens, each under the distribution that is predicted for its place.

    Args:
        predictions: N of them.
        targets: (N,) int64, the tokens.
        temperatures: (N,) float32, > 0.
        masks: what the sampler allowed at each of the N tokens; empty: everything.
        entropy_gradient: whether the entropy has a gradient, too.
        max_logits: bound of rows × V in a chunk; a chunk has at least one row.

    >>> undecided = Predictions(torch.zeros(3, 2), lambda hidden: hidden, 2)
    >>> scores = token_scores(undecided, torch.tensor([0, 1, 1]), torch.ones(3), max_logits=4)
    >>> scores.logprobs.exp().tolist()
    [0.5, 0.5, 0.5]
    """
    hidden, project, vocabulary = predictions
    count = len(targets)
    rows = max(1, max_logits // vocabulary)
    if rows >= count:
        return _scores(project, hidden, targets, temperatures, masks, entropy_gradient)
    parts: list[TokenScores] = []
    again = as_chosen(_scores)
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        numbers = (hidden[part], targets[part], temperatures[part], masks[part], entropy_gradient)
        parts.append(
            checkpoint(again, project, *numbers, use_reentrant=False, preserve_rng_state=False)
        )
    return TokenScores(
        torch.cat([part.logprobs for part in parts]), torch.cat([part.entropy for part in parts])
    )


def _scores(
    project: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    masks: Sequence[Mask | None],
    entropy_gradient: bool,
) -> TokenScores:
    logits = project(hidden).float() / temperatures[:, None]  # (R, V)
    if any(mask is not None for mask in masks):
        logits = forbid(logits, masks)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return TokenScores(chosen, entropy)
