"""Weights for tokens that another policy sampled: ρ = π_old/μ of a token, μ the engine's policy.

The ratio π/π_old is the loss's business; what lies between π_old and μ (the numerics of another
engine, older weights) is corrected here, once per token, with a factor that has no gradient. Where
`terms.old` is what the engine recorded, every ρ is 1.

`truncate` and `truncate_call` weigh; `mask_call`, `mask_call_k3` and `veto` choose, 1 or 0; `mask`
does both; `product` joins several. The larger unit is a call, not a rollout: its tokens are one
sample, and together in a micro-batch. Tokens of weight 0 stay in the normaliser's count.

Sources: truncation: Ionides, "Truncated importance sampling", 2008; IMPALA, arXiv 1802.01561; for
the gap between engines: F. Yao et al., "Your efficient RL framework secretly brings you off-policy
RL training", 2025. Rejection of calls: J. Liu, Y. Li et al., "When speed kills stability", 2025.
"""

import math

import torch
from torch import Tensor

from fulmen.learner.ratios import bounded_exp, call_mean, call_sum
from fulmen.learner.terms import Correction, Terms


def uncorrected(terms: Terms) -> Tensor:
    """1 for every token, (N,).

    >>> from fulmen.learner.terms import example
    >>> uncorrected(example(behaviour=[0.5, 0.25]))
    tensor([1., 1.])
    """
    return torch.ones_like(terms.old)


def truncate(terms: Terms, *, high: float) -> Tensor:
    """min(ρ, high) of each token, (N,): truncated importance sampling (TIS), usually high = 2.

    >>> from fulmen.learner.terms import example
    >>> truncate(example(behaviour=[0.8, 0.25]), high=2.0)
    tensor([1.2500, 2.0000])
    """
    return bounded_exp(_log_ratios(terms)).clamp(max=high)


def truncate_call(terms: Terms, *, high: float) -> Tensor:
    """min(Π ρ over the call, high), (N,): unbiased up to the truncation, usually high = 5.

    The product of a long call is 0 or huge for differences that mean nothing token by token: with a
    mean log ρ of 0.01 it is 2.7 after 100 tokens and 2·10⁴ after 1,000.

    >>> from fulmen.learner.terms import example
    >>> truncate_call(example(behaviour=[0.5, 0.8, 0.8], calls=[0, 0, 1]), high=2.0)
    tensor([2.0000, 2.0000, 1.2500])
    """
    return _exp(call_sum(_log_ratios(terms), terms.calls), terms).clamp(max=high)


def mask(terms: Terms, *, low: float, high: float) -> Tensor:
    """ρ of each token where low ≤ ρ ≤ high, else 0, (N,): IcePop, there low = 0.5, high = 5.

    Source: IcePop in Ring-1T, arXiv 2510.18855.

    >>> from fulmen.learner.terms import example
    >>> mask(example(behaviour=[0.8, 0.1, 4.0]), low=0.5, high=5.0)
    tensor([1.2500, 0.0000, 0.0000])
    """
    ratio = bounded_exp(_log_ratios(terms))
    return ratio.where((ratio >= low) & (ratio <= high), 0.0)


def mask_call(terms: Terms, *, low: float, high: float) -> Tensor:
    """1 where low ≤ exp(mean log ρ over the call) ≤ high, else 0, (N,); usually 0.99 and 1.01.

    The geometric mean of a call's ratios, so that the length of a call does not decide.

    >>> from fulmen.learner.terms import example
    >>> mask_call(example(behaviour=[0.5, 2.0, 0.5], calls=[0, 0, 1]), low=0.99, high=1.01)
    tensor([1., 1., 0.])
    """
    ratio = _exp(call_mean(_log_ratios(terms), terms.calls), terms)
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


def mask_call_k3(terms: Terms, *, limit: float) -> Tensor:
    """1 where the mean of ρ − log ρ − 1 over the call is at most `limit`, else 0, (N,).

    That mean estimates KL(μ ‖ π_old) and has no negative terms: differences in both directions,
    which cancel in `mask_call`, add up. Usually 0.001 to 0.01.

    >>> from fulmen.learner.terms import example
    >>> mask_call_k3(example(behaviour=[0.5, 2.0, 0.9], calls=[0, 0, 1]), limit=0.01)
    tensor([0., 0., 1.])
    """
    log_ratio = _log_ratios(terms)
    mean = call_mean(bounded_exp(log_ratio) - log_ratio - 1, terms.calls)
    return (mean <= limit).to(terms.old.dtype)


def veto(terms: Terms, *, low: float) -> Tensor:
    """0 for a call with any token whose ρ < low, else 1, (N,); usually low = 1e-4.

    Such a token is one that π_old would not have sampled: garbage, a wrong grammar or temperature,
    other weights than the record says. What followed it is worth nothing either.

    >>> from fulmen.learner.terms import example
    >>> veto(example(old=[1.0, 1e-6, 1.0], calls=[0, 0, 1]), low=1e-4)
    tensor([0., 0., 1.])
    """
    impossible = _log_ratios(terms) < math.log(low)
    return (call_sum(impossible, terms.calls) == 0).to(terms.old.dtype)


def product(*corrections: Correction) -> Correction:
    """The correction whose weight is the product of theirs: say, a truncation and a veto.

    >>> from functools import partial
    >>> from fulmen.learner.terms import example
    >>> both = product(partial(truncate, high=2.0), partial(veto, low=1e-4))
    >>> both(example(old=[1.0, 1e-6, 1.0], behaviour=[1.0, 1.0, 0.25], calls=[0, 0, 1]))
    tensor([0., 0., 2.])
    """

    def correct(terms: Terms) -> Tensor:
        return math.prod(
            (correction(terms) for correction in corrections), start=uncorrected(terms)
        )

    return correct


def effective_share(weights: Tensor) -> float:
    """(Σ w)² / (N·Σ w²): how many equal samples N weighted ones are worth, as a share of N.

    1 where all weights are equal, 1/N where one is all there is, 0 where all are 0 or there are
    none. A share that falls is the first sign of an off-policy collapse.

    Source: L. Kish, "Survey sampling", 1965.

    >>> effective_share(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    0.5
    """
    values = weights.double()
    squares = float(values.square().sum()) * len(values)
    return float(values.sum()) ** 2 / squares if squares > 0 else 0.0


def _log_ratios(terms: Terms) -> Tensor:
    """(N,) log ρ without gradient."""
    return (terms.old - terms.behaviour).detach()


def _exp(log_ratio: Tensor, terms: Terms) -> Tensor:
    return bounded_exp(log_ratio).to(terms.old.dtype)
