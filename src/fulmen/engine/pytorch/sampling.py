"""Choosing the next token of many sequences at once.

The random number of a token depends on its request's seed and its position, on nothing else: not on
the neighbours in the batch, nor on the order of arrival.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Choice(NamedTuple):
    """One token for each of B sequences."""

    ids: Tensor
    """(B,) int64."""
    logprobs: Tensor
    """(B,) float32, nats, under the distribution that was sampled from."""
    table: Tensor
    """(B, V) float32 log-probabilities at the sequence's temperature, before top-p."""


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(B,) numbers in [0, 1), one per (seed, position): SplitMix64's output function.

    Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014.

    >>> seeds = np.array([1, 1, 2], dtype=np.uint64)
    >>> uniforms(seeds, np.array([0, 1, 0])).round(3).tolist()
    [0.368, 0.944, 0.392]
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        mixed = _mix(state)
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose(logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniform: Tensor) -> Choice:
    """Sample one token for each row.

    Args:
        logits: (B, V), any float dtype.
        temperatures: (B,) float32; 0 takes the most likely token, with its log-probability at
            temperature 1.
        top_ps: (B,) float32 in (0, 1]; the smallest set of most likely tokens holding at least
            this much probability is sampled from, renormalised.
        uniform: (B,) float in [0, 1), one random number per row.
    """
    greedy = temperatures == 0
    divisors = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    table = torch.log_softmax(logits.float() / divisors[:, None], dim=-1)
    probabilities = table.exp()
    if bool((top_ps < 1).any()):
        probabilities = _nucleus(probabilities, top_ps)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1]
    # Rounding can put the number at the total; the last token with any probability is meant.
    drawn = torch.minimum(uniform.to(total) * total, total.nextafter(torch.zeros_like(total)))
    sampled = torch.searchsorted(cumulative, drawn[:, None], right=True).squeeze(1)
    sampled = sampled.clamp_(max=logits.shape[-1] - 1)  # logits that are no numbers end up here
    ids = torch.where(greedy, table.argmax(-1), sampled)
    logprobs = table.gather(1, ids[:, None]).squeeze(1)
    return Choice(ids, torch.where(greedy, logprobs, logprobs - total.log()), table)


def _nucleus(probabilities: Tensor, top_ps: Tensor) -> Tensor:
    """Zero what lies outside each row's nucleus, (B, V)."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    # A token belongs to the nucleus if the more likely ones together hold less than top-p.
    outside = ordered.cumsum(-1) - ordered >= top_ps[:, None]
    return torch.zeros_like(probabilities).scatter(1, order, ordered.masked_fill(outside, 0.0))
