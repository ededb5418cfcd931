"""Estimates of KL(π ‖ π_ref) from one sampled token: in the reward, or in the loss.

Δ = log π − log π_ref of a token that π sampled. What matters in a loss is not whether the value is
right on average but whether its gradient is. E is over tokens of π after a given beginning, so what
the policy could do to be in other beginnings is in none of the gradients (arXiv 2506.09477).

| | value | on average | gradient | on average |
|---|---|---|---|---|
| k1 | Δ | KL(π ‖ π_ref) | ∇log π | 0 |
| k2 | ½Δ² | something else, near it where Δ is small | Δ·∇log π | ∇KL(π ‖ π_ref) |
| k3 | e^−Δ + Δ − 1 | KL(π ‖ π_ref) | (1 − π_ref/π)·∇log π | ∇KL(π_ref ‖ π) |

So: k1 in the reward, k2 in the loss. k3 in the loss, as in GRPO, pulls with the forward divergence:
near the reference the two are alike; far from it, k3's pull on a token that π made likelier never
exceeds 1, and on one that π made rarer is as large as π_ref/π.

Source: J. Schulman, "Approximating KL divergence", 2020; the gradients: arXiv 2506.09477.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fulmen.learner.ratios import MAX_LOG_RATIO
from fulmen.schema.errors import ConfigError


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Δ, (N,), for the reward. Negative where π_ref likes the token better.

    E[∇Δ] = E[∇log π] = Σ ∇π = 0: minimising it does nothing but add noise, so it has to be
    computed without gradient.

    Raises:
        ConfigError: `logprobs` has a gradient.

    >>> k1(torch.tensor([-1.0]), torch.tensor([-1.5])).tolist()
    [0.5]
    """
    if logprobs.requires_grad:
        raise ConfigError("k1 in the loss has a gradient of 0 on average", hint="use k2 there")
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """½Δ², (N,), for the loss: its gradient Δ·∇log π is right for tokens that π sampled.

    E[Δ·∇log π] = Σ ∇π·Δ = ∇ Σ π·Δ, since Σ π·∇Δ = 0. Beyond |Δ| = 20 it grows linearly (the
    gradient counts Δ as ±20), so that no token outweighs a batch.

    >>> k2(torch.tensor([-1.0]), torch.tensor([-1.5])).tolist()
    [0.125]
    """
    return functional.huber_loss(logprobs, reference, reduction="none", delta=MAX_LOG_RATIO)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """e^−Δ + Δ − 1, (N,): never negative, and of less variance than k1. GRPO's, in the loss.

    Its gradient (1 − π_ref/π)·∇log π is not that of KL(π ‖ π_ref): E[−π_ref/π·∇log π] =
    −Σ π_ref·∇log π, which is ∇KL(π_ref ‖ π). Δ below −20 counts as −20, without gradient.

    Source: GRPO, arXiv 2402.03300, equation 4.

    >>> k3(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1065])
    """
    delta = (logprobs - reference).clamp(min=-MAX_LOG_RATIO)
    # expm1: near the reference 1 would swallow all that the sum is about.
    return torch.expm1(-delta) + delta
