"""Advantages: first the baseline of the rollout, then the rule for its calls, then whitening."""

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from msgspec import structs

from fulmen.credit.assign import CreditRule, identical
from fulmen.credit.baselines import Baseline, Centred, Numbers, grpo
from fulmen.credit.tokens import TokenNumbers, TokenRule, by_trajectory, spread
from fulmen.credit.turns import TurnGroups
from fulmen.credit.whitening import Whitening, as_it_is
from fulmen.schema.errors import DataError
from fulmen.schema.records import Credited, Trajectory


def credit(
    trajectories: Sequence[Trajectory],
    *,
    rule: CreditRule = identical,
    baseline: Baseline = grpo,
    turns: TurnGroups | None = None,
    tokens: TokenRule | None = None,
    penalties: TokenNumbers | None = None,
    whitening: Whitening = as_it_is,
) -> list[Credited]:
    """Give every trained transition its advantage: first the baseline, then the rule.

    The final rewards become advantages by `baseline`, over all trajectories, those without any
    trainable call included. Intermediate rewards are put on the same scale, divided by the
    baseline's unit, and keep their sign: nothing is taken off them. Then `rule` spreads both over
    the transitions. So under identical credit and without intermediate rewards a transition's
    advantage is that of its rollout, and changing one reward changes what the rule says and nothing
    else. Last comes `whitening`, over all that was credited.

    Args:
        trajectories: of whole groups.
        rule: how a trajectory's rewards become returns of its calls.
        baseline: how final rewards are centred and scaled.
        turns: also compare turns in the same state, across a group.
        tokens: gives each token a return of its own, in the place of `rule`.
        penalties: one sequence per trained transition, in the order of the result; what is taken
            off the reward of each completion token (β·kl_t). Divided by the baseline's unit, too.
        whitening: what is done to all advantages of the step together.

    Returns:
        One record per trained transition, in order; with `token_advantages` if `tokens` or
        `penalties` are given, and their mean as `advantage`.

    Raises:
        DataError: a reward is no finite number, the baseline gave no finite numbers, or the
            penalties do not fit the tokens.

    >>> credit([])
    []
    """
    check_rewards(trajectories)
    centred = _centred(trajectories, baseline)
    shaped = _shaped(trajectories, centred)
    added = turns(trajectories) if turns else [[0.0] * len(t.transitions) for t in trajectories]
    credited: list[Credited] = []
    if tokens is None and penalties is None:
        for whole, scaled, addends in zip(trajectories, shaped, added, strict=True):
            credited += _of_calls(whole, rule(scaled), addends)
        return whitening(credited)
    each = tokens or spread(rule)
    taken_off = _on_scale(trajectories, penalties, centred.units)
    for whole, scaled, addends, off in zip(trajectories, shaped, added, taken_off, strict=True):
        credited += _of_tokens(whole, each(scaled, off), addends)
    return whitening(credited)


def _of_calls(
    trajectory: Trajectory, values: Sequence[float], addends: Sequence[float]
) -> Iterator[Credited]:
    for transition, value, more in zip(trajectory.transitions, values, addends, strict=True):
        if transition.trained:
            yield Credited(
                transition=transition,
                advantage=value + more,
                group=trajectory.group,
                kind=trajectory.kind,
            )


def _of_tokens(
    trajectory: Trajectory, values: Sequence[Sequence[float]], addends: Sequence[float]
) -> Iterator[Credited]:
    for transition, own, more in zip(trajectory.transitions, values, addends, strict=True):
        if transition.trained:
            yield Credited(
                transition=transition,
                advantage=math.fsum(own) / len(own) + more if own else 0.0,
                token_advantages=tuple(value + more for value in own),
                group=trajectory.group,
                kind=trajectory.kind,
            )


def check_rewards(trajectories: Sequence[Trajectory]) -> None:
    """Raises DataError if a reward is NaN or infinite, with the rollout it was given to."""
    for trajectory in trajectories:
        own = (transition.reward for transition in trajectory.transitions)
        for reward in (trajectory.reward, trajectory.intermediate, *own):
            if not math.isfinite(reward):
                raise DataError(
                    f"a reward of rollout {trajectory.rollout_id} is {reward}, no finite number"
                )


def _centred(trajectories: Sequence[Trajectory], baseline: Baseline) -> Centred:
    """The final rewards after the baseline, which may be a user's: checked."""
    rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    centred = baseline(rewards, [t.group for t in trajectories])
    values, units = (np.asarray(numbers, dtype=np.float64) for numbers in centred)
    for name, numbers in (("values", values), ("units", units)):
        if numbers.shape != rewards.shape or not np.isfinite(numbers).all():
            raise DataError(
                f"the {name} of the advantage function are not {len(rewards)} finite numbers, "
                "one per rollout"
            )
    if (units <= 0).any():
        raise DataError(f"the advantage function gave a unit of {units.min():g}; units are above 0")
    return Centred(values, units)


def _shaped(trajectories: Sequence[Trajectory], centred: Centred) -> list[Trajectory]:
    """The same trajectories with centred final rewards, all rewards on the baseline's scale."""
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
        for trajectory, final, unit in zip(trajectories, *centred, strict=True)
    ]


def _on_scale(
    trajectories: Sequence[Trajectory], penalties: TokenNumbers | None, units: Numbers
) -> list[TokenNumbers | None]:
    if penalties is None:
        return [None] * len(trajectories)
    shares = by_trajectory(trajectories, penalties, "penalties")
    return [
        [[float(p / unit) for p in own] for own in share]
        for share, unit in zip(shares, units, strict=True)
    ]


def share_with_signal(groups: Collection[str], credited: Sequence[Credited]) -> float:
    """The share of groups that move the policy: those with a call, or a token, whose advantage is
    not 0. 0 without groups.

    >>> from fulmen.credit.assign import example
    >>> one = structs.replace(example(1.0, [("writer", 0.0)]), group="one")
    >>> other = structs.replace(example(0.0, [("writer", 0.0)]), group="one")
    >>> share_with_signal({"one", "two"}, credit([one, other]))
    0.5
    """
    moved = {item.group for item in credited if item.advantage or any(item.token_advantages)}
    return len(moved) / len(groups) if groups else 0.0
