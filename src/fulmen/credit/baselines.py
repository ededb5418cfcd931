"""Baselines: what was to be expected of a rollout is taken off its final reward.

One value per rollout, whatever number of calls it made, so a talkative rollout weighs no more than
a terse one. All statistics are over all rollouts that have a reward, in float64, before any call is
dropped; deviations are the population's, so that duplicating a group changes nothing.

A baseline is a plain function of (R,) final rewards and the (R,) names of their groups: rollouts
with equal names ran the same task in the same step. In the formulas R_i is the reward of a rollout,
mean and std are over its group of G.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fulmen.schema.errors import DataError

Numbers = npt.NDArray[np.float64]

EQUAL = 1e-8
"""Numbers this close are equal up to rounding: dividing by their standard deviation would blow
rounding up to advantages of order one."""

_LEAST_UNIT = 0.1
"""Final rewards that hardly differ must not blow intermediate ones up: ten times is the most."""


class Centred(NamedTuple):
    """Per rollout."""

    values: Numbers
    """(R,) the advantage of the rollout: its final reward without what was to be expected."""
    units: Numbers
    """(R,) > 0; its other rewards are divided by this, so that all are on one scale."""


Baseline = Callable[[Numbers, Sequence[str]], Centred]


def grpo(rewards: Numbers, groups: Sequence[str]) -> Centred:
    """(R_i − mean) / std; 0 where all rewards of the group are equal, so for a group of one.

    Other rewards are divided by the same deviation, but by no less than 0.1, and by 1 where all
    final ones are equal.

    Source: GRPO, arXiv 2402.03300, section 4.1.2.

    >>> grpo(np.array([1.0, 0.0, 1.0, 1.0]), ["a", "a", "b", "b"]).values.tolist()
    [1.0, -1.0, 0.0, 0.0]
    """

    def scaled(own: Numbers) -> Numbers:
        centred = own - own.mean()
        return centred / centred.std()

    return Centred(
        values=_where_unequal(rewards, groups, scaled, otherwise=0.0),
        units=_where_unequal(
            rewards, groups, lambda own: max(own.std(), _LEAST_UNIT), otherwise=1.0
        ),
    )


def group_mean(rewards: Numbers, groups: Sequence[str]) -> Centred:
    """R_i − mean. An easy and a hard task keep their smaller deviations.

    Source: Dr. GRPO, arXiv 2503.20783; with `whitening.over_batch` after it, it is the baseline of
    REINFORCE++-baseline, arXiv 2501.03262.

    >>> group_mean(np.array([1.0, 0.0, 1.0, 1.0]), ["a", "a", "b", "b"]).values.tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    values = _where_unequal(rewards, groups, lambda own: own - own.mean(), otherwise=0.0)
    return Centred(values, np.ones_like(rewards))


def rloo(rewards: Numbers, groups: Sequence[str]) -> Centred:
    """R_i − mean of the others = G/(G−1) · (R_i − mean); 0 for a group of one.

    Source: RLOO, arXiv 2402.14740.

    >>> rloo(np.array([1.0, 0.0, 0.5, 7.0]), ["a", "a", "a", "b"]).values.tolist()
    [0.75, -0.75, 0.0, 0.0]
    """

    def without_itself(own: Numbers) -> Numbers:
        return len(own) / (len(own) - 1) * (own - own.mean())

    values = _where_unequal(rewards, groups, without_itself, otherwise=0.0)
    return Centred(values, np.ones_like(rewards))


def maxrl(rewards: Numbers, groups: Sequence[str]) -> Centred:
    """(R_i − mean) / mean; 0 where all rewards of the group are equal.

    With rewards of 0 and 1, and ever larger groups, the gradient becomes that of the log-likelihood
    of success: the rarer it is, the more it counts. Other rewards are divided by the same mean, but
    by no less than 0.1, and by 1 where all final ones are equal.

    Source: MaxRL, arXiv 2602.02710.

    Raises:
        DataError: a reward is below 0, where the mean is no scale.

    >>> maxrl(np.array([1.0, 0.0, 0.0, 0.0]), ["a"] * 4).values.tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    if (rewards < 0).any():
        raise DataError(
            f"maxrl needs rewards of at least 0, and one is {rewards.min():g}",
            hint="choose another advantage, or rewards between 0 and 1",
        )

    def scaled(own: Numbers) -> Numbers:
        return (own - own.mean()) / own.mean()

    return Centred(
        values=_where_unequal(rewards, groups, scaled, otherwise=0.0),
        units=_where_unequal(
            rewards, groups, lambda own: max(own.mean(), _LEAST_UNIT), otherwise=1.0
        ),
    )


def batch_mean(rewards: Numbers, groups: Sequence[str]) -> Centred:
    """R_i − the mean of all rollouts of the step, whatever their group. Groups of one are fine.

    Source: REINFORCE with a baseline, R. Williams, Machine Learning 8 (1992). Its baseline is that
    of the step itself, not a moving one: nothing is carried from step to step.

    >>> batch_mean(np.array([1.0, 0.0, 0.0, 1.0]), ["a", "b", "c", "d"]).values.tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    return group_mean(rewards, [""] * len(groups))


def no_baseline(rewards: Numbers, groups: Sequence[str]) -> Centred:  # noqa: ARG001 - a Baseline
    """R_i as it is: plain REINFORCE, and REINFORCE++ before its whitening.

    >>> no_baseline(np.array([1.0, 0.5]), ["a", "b"]).values.tolist()
    [1.0, 0.5]
    """
    return Centred(rewards.copy(), np.ones_like(rewards))


def _where_unequal(
    rewards: Numbers,
    groups: Sequence[str],
    formula: Callable[[Numbers], Numbers | float],
    *,
    otherwise: float,
) -> Numbers:
    """(R,) `formula` of each group's rewards; `otherwise` in groups whose rewards are all equal."""
    result = np.full_like(rewards, otherwise)
    places: dict[str, list[int]] = {}
    for place, name in enumerate(groups):
        places.setdefault(name, []).append(place)
    for members in places.values():
        own = rewards[members]
        if np.ptp(own) >= EQUAL:
            result[members] = formula(own)
    return result
