"""PPO's advantages: a critic says what was to be expected, instead of the other rollouts.

The learner gives a value for every sampled token: what the critic foresees just before it. From
values and rewards come advantages, and the returns that the critic should have foreseen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fulmen.credit.advantage import check_rewards
from fulmen.credit.tokens import TokenNumbers, by_trajectory, token_rewards
from fulmen.credit.whitening import Whitening, as_it_is
from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Credited, Trajectory


class Estimate(NamedTuple):
    """Per step of the decision process: a token, or a call."""

    advantages: list[float]
    returns: list[float]
    """Targets of the critic: value + advantage."""


def gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float = 1.0, lam: float = 0.95
) -> Estimate:
    """A_t = Σ_{l≥0} (γλ)^l · δ_{t+l}, δ_t = r_t + γ·V_{t+1} − V_t; after the last step V is 0.

    λ = 1 is the return minus the value, λ = 0 the one-step error δ.

    Args:
        rewards: (T,) of each step.
        values: (T,) foreseen before each step.
        gamma: γ, from one step to the next.
        lam: λ: from trusting the critic (0) to trusting what happened (1).

    Source: generalised advantage estimation, arXiv 1506.02438, eq. 16.

    >>> gae([0.0, 1.0], [0.5, 0.25], gamma=1.0, lam=0.5)
    Estimate(advantages=[0.125, 0.75], returns=[0.625, 1.0])
    """
    advantages: list[float] = []
    later = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + gamma * next_value - value + gamma * lam * later
        next_value = value
        advantages.append(later)
    advantages.reverse()
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return Estimate(advantages, returns)


@dataclass(frozen=True, slots=True)
class GAE:
    """GAE over the trained tokens of a trajectory, or over its trained calls.

    `token`: every sampled token is a step. Prompts, answers of tools and calls that are not trained
    are skipped: the value after a call's last token is that before the next call's first.

    `turn`: every trained call is a step, with the value at its last prompt token (the first of its
    values; the others are not used) and the sum of its rewards. All its tokens share its advantage
    and its return. One wrong token does not change what the critic thinks of the next.

    Rewards of calls in between that are not trained belong to the step before (`token_rewards`).

    Source: token: PPO, arXiv 1707.06347, eq. 11, over several turns as they are one; turn: the same
    with a turn as the action.

    Raises:
        ConfigError: γ is not in (0, 1], or λ not in [0, 1].
    """

    gamma: float = 1.0
    lam: float = 0.95
    step: Literal["token", "turn"] = "token"

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"discount is {self.gamma}", hint="give a number in (0, 1]")
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"gae_lambda is {self.lam}", hint="give a number from 0 to 1")

    def __call__(
        self, trajectory: Trajectory, values: TokenNumbers, penalties: TokenNumbers | None = None
    ) -> list[Estimate]:
        """One estimate per transition, with a number for each trained token."""
        rewards = token_rewards(trajectory, penalties)
        if self.step == "turn":
            return self._of_turns(rewards, values)
        found = gae(
            [r for own in rewards for r in own],
            [v for own in values for v in own],
            gamma=self.gamma,
            lam=self.lam,
        )
        advantages, returns = iter(found.advantages), iter(found.returns)
        return [
            Estimate([next(advantages) for _ in own], [next(returns) for _ in own])
            for own in rewards
        ]

    def _of_turns(self, rewards: list[list[float]], values: TokenNumbers) -> list[Estimate]:
        found = gae(
            [sum(own) for own in rewards if own],
            [own[0] for own in values if own],
            gamma=self.gamma,
            lam=self.lam,
        )
        steps = iter(zip(found.advantages, found.returns, strict=True))
        estimates: list[Estimate] = []
        for own in rewards:
            advantage, value = next(steps) if own else (0.0, 0.0)
            estimates.append(Estimate([advantage] * len(own), [value] * len(own)))
        return estimates


def credit_with_critic(
    trajectories: Sequence[Trajectory],
    values: TokenNumbers,
    *,
    estimator: GAE = GAE(),
    penalties: TokenNumbers | None = None,
    whitening: Whitening = as_it_is,
) -> list[Credited]:
    """Give every trained transition advantages and returns of its tokens.

    Rewards count as they were given: no baseline, no scale of a group. Whitening changes the
    advantages and leaves the returns alone.

    Args:
        trajectories: any; they are not compared with each other.
        values: one sequence per trained transition, in the order of the result; one number per
            completion token, foreseen just before it.
        estimator: GAE over tokens or over turns.
        penalties: as `values`: what is taken off the reward of each token (β·kl_t).
        whitening: of the advantages of the step.

    Raises:
        DataError: a reward is no finite number, or values or penalties do not fit the tokens.

    >>> from fulmen.credit.assign import example
    >>> one, two = credit_with_critic([example(1.0, [("a", 0.0)] * 2)], [[0.5], [0.75]])
    >>> one.token_advantages, two.token_advantages, two.returns
    ((0.4875,), (0.25,), (1.0,))
    """
    check_rewards(trajectories)
    foreseen = by_trajectory(trajectories, values, "values")
    taken_off: Sequence[TokenNumbers | None] = [None] * len(trajectories)
    if penalties is not None:
        taken_off = by_trajectory(trajectories, penalties, "penalties")
    return whitening(
        [
            Credited(
                transition=transition,
                advantage=float(np.mean(estimate.advantages)) if estimate.advantages else 0.0,
                token_advantages=tuple(estimate.advantages),
                returns=tuple(estimate.returns),
                group=trajectory.group,
                kind=trajectory.kind,
            )
            for trajectory, own, off in zip(trajectories, foreseen, taken_off, strict=True)
            for transition, estimate in zip(
                trajectory.transitions, estimator(trajectory, own, off), strict=True
            )
            if transition.trained
        ]
    )
