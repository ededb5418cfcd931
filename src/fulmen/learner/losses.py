"""Policy-gradient losses and the critic's: pure functions of the numbers of N sampled tokens.

Each returns one loss per token and what is worth watching. Corrections, weights and the sum are the
caller's. In the formulas r = π/π_old of a token (`terms.old` is the anchor of the trust region, not
the policy that sampled), A its advantage, and sg(·) has the value of its argument and no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.learner.ratios import MAX_LOG_RATIO, bounded_exp, call_mean
from fulmen.learner.terms import PolicyLoss, Terms
from fulmen.schema.errors import ConfigError


def clipped_surrogate(
    terms: Terms, *, low: float, high: float, dual: float | None = None
) -> PolicyLoss:
    """−min(r·A, clip(r, 1 − low, 1 + high)·A); with `dual` c, where A < 0, at most −c·A.

    The gradient is −r·A·∇log π, or 0 where the step already went far enough. Without `dual` a
    token with A < 0 that became much likelier since has a gradient as large as r.

    Args:
        terms: N tokens.
        low: how far the ratio may fall below 1.
        high: how far it may rise above 1.
        dual: c > 1, the ratio beyond which a token with A < 0 is left alone; None: none.

    Source: PPO, arXiv 1707.06347, equation 7; a higher upper clip: DAPO, arXiv 2503.14476,
    equation 10; dual clip: D. Ye et al., arXiv 1912.09729 (there c = 3).

    Raises:
        ConfigError: `dual` is not above 1.

    >>> from fulmen.learner.terms import example
    >>> drifted = example(new=[1.5, 0.5, 5.0], advantages=[1.0, 1.0, -1.0])
    >>> clipped_surrogate(drifted, low=0.2, high=0.28).loss
    tensor([-1.2800, -0.5000,  5.0000])
    >>> clipped_surrogate(drifted, low=0.2, high=0.28, dual=3.0).loss
    tensor([-1.2800, -0.5000,  3.0000])
    """
    return _pessimistic(terms.logprobs - terms.old, terms.advantages, low, high, dual)


def gspo(terms: Terms, *, low: float, high: float) -> PolicyLoss:
    """−min(s·A, clip(s, 1 − low, 1 + high)·A) with one ratio s for all tokens of a call.

    s = exp(mean over the call of log r), the geometric mean of its ratios. The call as a whole is
    inside the trust region or outside. The gradient is −s·A·∇log π of each token. Where a call has
    one advantage, that is the gradient of −|call|·min(s·A, …); where each token has its own, it is
    the paper's GSPO-token. A token that a correction leaves out has no part in the gradient.

    Such ratios stay much closer to 1: the paper clips at low = 3e-4, high = 4e-4. With the
    normaliser `transition` the loss is the paper's for single calls; it says nothing of rollouts of
    several calls, and here each call has a ratio of its own.

    Source: GSPO, arXiv 2507.18071, equations 5 and 7; GSPO-token, equations 13 and 14.

    >>> from fulmen.learner.terms import example
    >>> gspo(example(new=[4.0, 0.5, 1.0, 0.5], calls=[0, 0, 0, 1]), low=0.2, high=0.28)._asdict()
    ... # doctest: +NORMALIZE_WHITESPACE
    {'loss': tensor([-1.2599, -1.2599, -1.2599, -0.5000]),
     'ratio': tensor([1.2599, 1.2599, 1.2599, 0.5000]),
     'clipped': tensor([False, False, False, False])}
    """
    mean = call_mean((terms.logprobs - terms.old).detach(), terms.calls).to(terms.logprobs.dtype)
    # 0 in value: what is left of it is the gradient of the token's own log-probability.
    own = terms.logprobs - terms.logprobs.detach()
    return _pessimistic(mean + own, terms.advantages, low, high, None)


def cispo(terms: Terms, *, low: float, high: float) -> PolicyLoss:
    """−sg(clip(r, 1 − low, 1 + high))·A·log π: no token ever loses its gradient.

    `clipped` says where the weight was bounded. `low` of 1 or more is no lower bound; the paper has
    none, and tunes `high` only. Where `terms.old` is what the engine recorded, r corrects for the
    policy that sampled, and a correction on top would do so twice.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, equations 4 and 5.

    >>> from fulmen.learner.terms import example
    >>> policy = cispo(example(new=[0.5, 0.5], old=[0.25, 0.5]), low=1.0, high=0.28)
    >>> policy.loss, policy.clipped
    (tensor([0.8872, 0.6931]), tensor([ True, False]))
    """
    ratio = bounded_exp(terms.logprobs - terms.old).detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return PolicyLoss(-weight * terms.advantages * terms.logprobs, ratio, weight != ratio)


def reinforce(terms: Terms) -> PolicyLoss:
    """−A·log π: the policy gradient itself, without a trust region; `ratio` is there to watch.

    Right for the first update after sampling only, or with a correction.

    Source: R. Williams, "Simple statistical gradient-following algorithms for connectionist
    reinforcement learning", 1992; as used for language models in RLOO, arXiv 2402.14740.

    >>> from fulmen.learner.terms import example
    >>> reinforce(example(new=[0.5, 0.5], advantages=[2.0, -1.0])).loss
    tensor([ 1.3863, -0.6931])
    """
    return _plain(terms, terms.advantages)


def supervised(terms: Terms, *, by_advantage: bool = False) -> PolicyLoss:
    """−1[A > 0]·log π: imitate the tokens with a positive advantage, and ignore all others.

    Chosen tokens count alike, whatever their advantage, which is rejection-sampling fine-tuning:
    with advantages of 1 for chosen trajectories and 0 for others, it is supervised training on the
    chosen ones. With group baselines it chooses what was better than the mean of its group. With
    `by_advantage` the loss is −max(A, 0)·log π, and the better weigh more. There is no ratio in it:
    old tokens count as much as new ones.

    Normalisers count the ignored tokens too, so the loss is not the mean over chosen tokens but
    that times their share.

    Source: RAFT, arXiv 2304.06767, algorithm 1; rejection-sampling fine-tuning, arXiv 2308.01825.

    >>> from fulmen.learner.terms import example
    >>> mixed = example(new=[0.5, 0.5], advantages=[2.0, -1.0])
    >>> supervised(mixed).loss
    tensor([0.6931, 0.0000])
    >>> supervised(mixed, by_advantage=True).loss
    tensor([1.3863, 0.0000])
    """
    gain = terms.advantages.clamp(min=0)
    return _plain(terms, gain if by_advantage else gain.sign())


class ValueLoss(NamedTuple):
    """Per token."""

    loss: Tensor
    """(N,) to be minimised."""
    clipped: Tensor
    """(N,) bool: the trust region took the gradient away."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None
) -> ValueLoss:
    """½·max((V − R)², (clip(V, V_old − c, V_old + c) − R)²), the critic's.

    The critic may leave the neighbourhood of what it said before the step only where that is no
    gain: V is held back in the direction of R, never away from it.

    Args:
        values: (N,) V, the critic's prediction before each token, with gradient.
        old_values: (N,) V_old, what it predicted when the step began.
        returns: (N,) R, what it should have predicted.
        clip: c > 0, in units of the reward; None: ½·(V − R)².

    Source: the code of PPO, arXiv 1707.06347 (not in the paper), described in arXiv 2005.12729,
    section 3, where a minimum is printed for the code's maximum.

    >>> new, old, target = torch.tensor([1.0, 0.1]), torch.zeros(2), torch.tensor([2.0, 2.0])
    >>> value_loss(new, old, target, clip=0.5)
    ValueLoss(loss=tensor([1.1250, 1.8050]), clipped=tensor([ True, False]))
    """
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(plain / 2, torch.zeros_like(plain, dtype=torch.bool))
    held = values.clamp(old_values - clip, old_values + clip)
    bounded = (held - returns).square()
    return ValueLoss(torch.maximum(plain, bounded) / 2, bounded.detach() > plain.detach())


def _pessimistic(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> PolicyLoss:
    """The clip of PPO for any log ratio, (N,) with gradient."""
    if dual is not None and not dual > 1:
        raise ConfigError(f"dual clip is {dual}", hint="give a number above 1, usually 3")
    ratio = bounded_exp(log_ratio)
    plain = ratio * advantages
    gain = torch.minimum(plain, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual * advantages), gain)
    beyond = (log_ratio.abs() > MAX_LOG_RATIO) & (advantages != 0)
    return PolicyLoss(-gain, ratio.detach(), ((gain != plain) | beyond).detach())


def _plain(terms: Terms, weights: Tensor) -> PolicyLoss:
    """−weight·log π, nothing clipped."""
    ratio = bounded_exp(terms.logprobs - terms.old).detach()
    clipped = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(-weights * terms.logprobs, ratio, clipped)
