"""Ratios of probabilities, of tokens and of calls, bounded so that none can break a sum."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8: far outside any trust region, and still finite in float32 when squared. Without
a bound one stale token would make a whole step inf or NaN."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of each log ratio, which counts as ±20 where it is beyond that; there the gradient is 0.

    >>> bounded_exp(torch.tensor([0.0, -1e4, 1e4]))
    tensor([1.0000e+00, 2.0612e-09, 4.8517e+08])
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def call_sum(values: Tensor, calls: Tensor) -> Tensor:
    """Sum over the tokens of a call, repeated for each of them.

    Args:
        values: (N,), of any type.
        calls: (N,) int64, ≥ 0 and rising, as in `Terms`.

    Returns:
        (N,) float64: sums of thousands of small numbers, and calls differ much in length.

    >>> call_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([3., 3., 5.], dtype=torch.float64)
    """
    count = int(calls[-1]) + 1 if len(calls) else 0
    sums = torch.zeros(count, dtype=torch.float64, device=calls.device)
    return sums.index_add(0, calls, values.double())[calls]


def call_mean(values: Tensor, calls: Tensor) -> Tensor:
    """Mean over the tokens of a call, repeated for each of them, (N,) float64.

    >>> call_mean(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([1.5000, 1.5000, 5.0000], dtype=torch.float64)
    """
    return call_sum(values, calls) / call_sum(torch.ones_like(calls), calls)
