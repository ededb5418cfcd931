"""Policy-gradient losses: pure functions of per-token numbers, N trained tokens each.

Each returns one loss per token and what is worth watching. Summing, normalising and masking are
done once, by the caller.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# exp(20) is still finite in float32 and far outside any trust region; beyond it one stale token
# would turn the whole sum into inf or NaN.
_MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """Per token."""

    loss: Tensor
    """(N,) to be minimised."""
    ratio: Tensor
    """(N,) π/μ, without gradient."""
    clipped: Tensor
    """(N,) bool: the clip took the gradient away."""


def clipped_surrogate(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, low: float, high: float
) -> PolicyLoss:
    """PPO's pessimistic surrogate with a lower and an upper clip of their own.

    −min(r·A, clip(r, 1 − low, 1 + high)·A), r = exp(log π − log μ).

    Args:
        logprobs: (N,) log π of the trained policy, with gradient.
        behaviour: (N,) log μ as recorded when the token was sampled.
        advantages: (N,).
        low: how far the ratio may fall below 1.
        high: how far it may rise above 1.

    Source: PPO, arXiv 1707.06347, eq. 7; asymmetric clip: DAPO, arXiv 2503.14476, eq. 8.

    >>> new, old = torch.tensor([0.5, -0.5]).log1p(), torch.zeros(2)
    >>> clipped_surrogate(new, old, torch.tensor([1.0, 1.0]), low=0.2, high=0.28).loss.tolist()
    [-1.2799999713897705, -0.5]
    """
    ratio = (logprobs - behaviour).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1 - low, 1 + high) * advantages
    return PolicyLoss(-torch.minimum(plain, bounded), ratio.detach(), (bounded < plain).detach())


def kl_to_reference(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(π ‖ π_ref) per token, (N,): exp(Δ) − Δ − 1 with Δ = log π_ref − log π.

    Never negative, and without bias for tokens sampled from π ("k3").

    Source: J. Schulman, "Approximating KL divergence", 2020; used so in GRPO, arXiv 2402.03300,
    eq. 4.

    >>> kl_to_reference(torch.tensor([-1.0]), torch.tensor([-1.0])).tolist()
    [0.0]
    """
    delta = (reference - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return delta.exp() - delta - 1
