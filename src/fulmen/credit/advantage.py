"""Advantages: a return minus what was to be expected, one value per rollout, never per row."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import structs

from fulmen.credit.assign import CreditRule, identical
from fulmen.credit.turns import EQUAL, TurnGroups
from fulmen.schema.errors import DataError
from fulmen.schema.records import Credited, Trajectory

_LEAST_UNIT = 0.1
"""Final rewards that hardly differ must not blow intermediate ones up: ten times is the most."""


def group_advantage(
    returns: Sequence[float] | npt.NDArray[np.float64],
    groups: Sequence[str],
    *,
    scale: bool = True,
) -> npt.NDArray[np.float64]:
    """Return minus the mean return of its group, over the group's standard deviation.

    One value per rollout, whatever number of calls it made, so a talkative rollout weighs no more
    than a terse one. A group whose returns are all equal gets zeros: it carries no signal; so does
    a group of one. `scale=False` leaves out the division (Dr. GRPO). The deviation is the
    population's, so duplicating a group changes nothing.

    Args:
        returns: (R,) one finite number per rollout.
        groups: (R,) rollouts with equal names are compared with each other.
        scale: divide by the standard deviation.

    Returns:
        (R,) float64; sums to 0 in every group.

    Raises:
        DataError: lengths differ, or a return is NaN or infinite.

    Source: GRPO, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783.

    >>> group_advantage([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"]).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    values = np.asarray(returns, dtype=np.float64)
    if values.shape != (len(groups),):
        raise DataError(f"{len(values)} returns for {len(groups)} rollouts; one each is needed")
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(f"the return of rollout {first} is {values[first]}, not a finite number")
    result = np.zeros_like(values)
    for name in dict.fromkeys(groups):
        members = np.array([group == name for group in groups])
        result[members] = _centre(values[members], scale=scale)
    return result


def _centre(values: npt.NDArray[np.float64], *, scale: bool) -> npt.NDArray[np.float64]:
    if np.ptp(values) < EQUAL:
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred / centred.std() if scale else centred


def credit(
    trajectories: Sequence[Trajectory],
    *,
    rule: CreditRule = identical,
    scale: bool = True,
    turns: TurnGroups | None = None,
) -> list[Credited]:
    """Give every trained transition its advantage: first the baseline, then the rule.

    The final rewards of a group become advantages, over all its trajectories, those without any
    trainable call included. Intermediate rewards are put on the same scale, divided by the same
    standard deviation (1 where all final rewards are equal), and keep their sign: nothing is taken
    off them. Then `rule` spreads both over the transitions. So under identical credit and without
    intermediate rewards a transition's advantage is that of its rollout, and changing one reward
    changes what the rule says and nothing else.

    Args:
        trajectories: of whole groups.
        rule: how a trajectory's rewards become returns.
        scale: divide by the group's standard deviation.
        turns: also compare turns in the same state, across a group.

    >>> credit([])
    []
    """
    added = turns(trajectories) if turns else [[0.0] * len(t.transitions) for t in trajectories]
    return [
        Credited(transition=transition, advantage=value + more)
        for trajectory, shaped, addends in zip(
            trajectories, _shaped(trajectories, scale=scale), added, strict=True
        )
        for transition, value, more in zip(
            trajectory.transitions, rule(shaped), addends, strict=True
        )
        if transition.trained
    ]


def _shaped(trajectories: Sequence[Trajectory], *, scale: bool) -> list[Trajectory]:
    """The same trajectories with centred final rewards, all rewards on the group's scale."""
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    groups = [t.group for t in trajectories]
    finals = group_advantage(rewards, groups, scale=scale)
    units = _group_deviation(rewards, groups) if scale else np.ones_like(rewards)
    return [
        structs.replace(
            trajectory,
            reward=float(final),
            intermediate=float(trajectory.intermediate / unit),
            transitions=tuple(
                structs.replace(t, reward=float(t.reward / unit)) if t.reward else t
                for t in trajectory.transitions
            ),
        )
        for trajectory, final, unit in zip(trajectories, finals, units, strict=True)
    ]


def _group_deviation(
    rewards: npt.NDArray[np.float64], groups: Sequence[str]
) -> npt.NDArray[np.float64]:
    """(R,) what intermediate rewards of each rollout are divided by: the standard deviation of its
    group's final rewards, but no less than `_LEAST_UNIT`; 1 where all are equal."""
    result = np.ones_like(rewards)
    for name in dict.fromkeys(groups):
        members = np.array([group == name for group in groups])
        if np.ptp(rewards[members]) >= EQUAL:
            result[members] = max(rewards[members].std(), _LEAST_UNIT)
    return result


def share_with_signal(trajectories: Sequence[Trajectory]) -> float:
    """The share of groups that move the policy: final rewards differ, or there are others on the
    way. 0 without groups.

    >>> def of(group, reward):
    ...     return Trajectory(rollout_id="r", group=group, transitions=(), reward=reward)
    >>> share_with_signal([of("a", 0.0), of("a", 1.0), of("b", 1.0), of("b", 1.0)])
    0.5
    """
    by_group: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory.group, []).append(trajectory)
    if not by_group:
        return 0.0
    return sum(_has_signal(group) for group in by_group.values()) / len(by_group)


def _has_signal(group: Sequence[Trajectory]) -> bool:
    if float(np.ptp([trajectory.reward for trajectory in group])) >= EQUAL:
        return True
    return any(t.intermediate or any(c.reward for c in t.transitions) for t in group)
