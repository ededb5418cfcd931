"""What takes no part in a step because its numbers are missing, or because a correction says so."""

import torch
from torch import Tensor

from fulmen.learner.ratios import call_sum
from fulmen.learner.terms import Terms


def usable(terms: Terms) -> Tensor:
    """Which tokens belong to calls whose numbers are all there, (N,) bool.

    A call with one NaN or infinite number (an engine that gave no log-probabilities: NaN) is
    unusable as a whole, since its ratios and means are. It excludes itself, not its batch: call
    `select` before any loss or correction, because 0 · NaN is NaN.

    >>> from fulmen.learner.terms import example
    >>> usable(example(behaviour=[0.5, float("nan"), 0.5], calls=[0, 0, 1]))
    tensor([False, False,  True])
    """
    numbers = torch.stack([terms.logprobs, terms.old, terms.behaviour, terms.advantages])
    return call_sum(~numbers.detach().isfinite().all(0), terms.calls) == 0


def select(terms: Terms, keep: Tensor) -> Terms:
    """The tokens where `keep`, (N,) bool, is true, calls numbered anew.

    Tokens left out get a gradient of exactly 0.

    >>> from fulmen.learner.terms import example
    >>> select(example(calls=[0, 0, 1, 2]), torch.tensor([False, False, True, True])).calls
    tensor([0, 1])
    """
    kept = Terms(*(column[keep] for column in terms))
    return kept._replace(calls=torch.unique_consecutive(kept.calls, return_inverse=True)[1])


def weighted(loss: Tensor, weights: Tensor) -> Tensor:
    """loss × weight of each token, (N,); where the weight is 0, exactly 0, whatever the loss is.

    >>> weighted(torch.tensor([2.0, float("inf")]), torch.tensor([0.5, 0.0]))
    tensor([1., 0.])
    """
    return torch.where(weights > 0, loss, torch.zeros_like(loss)) * weights
