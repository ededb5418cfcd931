"""What every loss and correction sees: the sampled tokens of a micro-batch as flat tensors."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.schema.records import Credited


class Terms(NamedTuple):
    """N sampled tokens of M calls; the tokens of a call are all here, side by side and in order.

    A token that two calls share (equal beginnings, equal samples) has a term for each.
    """

    logprobs: Tensor
    """(N,) float32, log π of the trained policy, nats; the only one with a gradient."""
    old: Tensor
    """(N,) float32, log π_old, the policy that the trust region is around: the trained policy as
    it was when the step began, as the learner computes it, or else what the engine recorded."""
    behaviour: Tensor
    """(N,) float32, log μ as the engine recorded it when it sampled the token."""
    advantages: Tensor
    """(N,) float32."""
    calls: Tensor
    """(N,) int64, 0 … M−1, rising: which call a token belongs to."""


class PolicyLoss(NamedTuple):
    """Per token."""

    loss: Tensor
    """(N,) to be minimised."""
    ratio: Tensor
    """(N,) π/π_old, without gradient."""
    clipped: Tensor
    """(N,) bool: the trust region took the gradient away."""


PolicyLossFunction = Callable[[Terms], PolicyLoss]
"""A loss without its numbers: `functools.partial` gives it those."""

Correction = Callable[[Terms], Tensor]
"""(N,) float32 ≥ 0 without gradient, by which the loss of each token is multiplied because another
policy sampled it; 0 leaves the token out."""

Normaliser = Callable[[Sequence[Credited]], list[float]]
"""The calls of an optimiser step to one weight each. A call's tokens all have its weight, and the
loss is the weighted sum over all tokens."""


def example(
    *,
    new: Sequence[float] = (),
    old: Sequence[float] = (),
    behaviour: Sequence[float] = (),
    advantages: Sequence[float] = (),
    calls: Sequence[int] = (),
) -> Terms:
    """Terms for examples, from probabilities; what is not given is 1, and one call made them all.

    >>> example(new=[0.5, 1.0], calls=[0, 1]).logprobs
    tensor([-0.6931,  0.0000])
    """
    count = max(map(len, (new, old, behaviour, advantages, calls)))
    ones = [1.0] * count
    return Terms(
        logprobs=torch.tensor(new or ones).log(),
        old=torch.tensor(old or ones).log(),
        behaviour=torch.tensor(behaviour or ones).log(),
        advantages=torch.tensor(advantages or ones),
        calls=torch.tensor(calls or [0] * count),
    )
