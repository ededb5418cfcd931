"""Advantages: a return minus what was to be expected, one value per rollout, never per row."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fulmen.credit.assign import CreditRule, identical
from fulmen.schema.errors import DataError
from fulmen.schema.records import Credited, Trajectory

# Below this a group's returns are equal up to rounding, and dividing by their standard deviation
# would blow rounding up to advantages of order one.
_EQUAL = 1e-8


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
    if np.ptp(values) < _EQUAL:
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred / centred.std() if scale else centred


def credit(
    trajectories: Sequence[Trajectory],
    *,
    rule: CreditRule = identical,
    scale: bool = True,
) -> list[Credited]:
    """Give every transition its advantage.

    The baseline of a group is taken over the final rewards of all its trajectories, those without
    any trainable call included. A transition's advantage is its own return under `rule`, measured
    against that baseline and on that scale; with identical credit it is the advantage of its
    rollout.

    >>> credit([])
    []
    """
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    groups = [t.group for t in trajectories]
    advantages = group_advantage(rewards, groups, scale=scale)
    deviations = _group_deviation(rewards, groups) if scale else np.ones_like(rewards)
    return [
        Credited(
            transition=transition,
            advantage=float(advantage + (earned - trajectory.reward) / deviation),
        )
        for trajectory, advantage, deviation in zip(
            trajectories, advantages, deviations, strict=True
        )
        for transition, earned in zip(trajectory.transitions, rule(trajectory), strict=True)
    ]


def _group_deviation(
    rewards: npt.NDArray[np.float64], groups: Sequence[str]
) -> npt.NDArray[np.float64]:
    """(R,) standard deviation of each rollout's group; 1 where all rewards are equal."""
    result = np.ones_like(rewards)
    for name in dict.fromkeys(groups):
        members = np.array([group == name for group in groups])
        if np.ptp(rewards[members]) >= _EQUAL:
            result[members] = rewards[members].std()
    return result


def share_with_signal(trajectories: Sequence[Trajectory]) -> float:
    """The share of groups whose rewards differ; only they move the policy. 0 without groups.

    >>> def of(group, reward):
    ...     return Trajectory(rollout_id="r", group=group, transitions=(), reward=reward)
    >>> share_with_signal([of("a", 0.0), of("a", 1.0), of("b", 1.0), of("b", 1.0)])
    0.5
    """
    by_group: dict[str, list[float]] = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory.group, []).append(trajectory.reward)
    if not by_group:
        return 0.0
    return sum(float(np.ptp(r)) >= _EQUAL for r in by_group.values()) / len(by_group)
