"""Turns compared with each other: what else was done in the same situation, and how it ended.

The rollouts of a group begin in the same state and often meet again: the same question, the same
answer of a tool. Where they do, their turns are compared as the rollouts are, which says more of a
turn than the outcome of its whole rollout.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fulmen.credit.assign import discounted
from fulmen.credit.baselines import EQUAL
from fulmen.schema.codec import pack_tokens
from fulmen.schema.records import Call, Trajectory


def state_of(call: Call, parent: Call | None) -> str:
    """Names what the model was shown since it last spoke; the whole prompt if it had not spoken.

    A digest of the agent and the tokens behind the parent's prompt and completion: an answer of a
    tool, say. Equal names are equal situations only as far as these tokens tell them; what was said
    earlier is not in it, or hardly two rollouts would ever meet again.
    """
    begin = len(parent.prompt_ids) + len(parent.completion_ids) if parent else 0
    shown = call.agent.encode() + b"\0" + pack_tokens(call.prompt_ids[begin:])
    return hashlib.sha256(shown).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class TurnGroups:
    """The step-level part of GiGPO: ω·A^S is added to the advantage of the rollout.

    A^S of a turn is its discounted return Σ_{j≥k} γ^(j−k)·r_j minus the mean return of all turns of
    the group that were in the same state, over their standard deviation; 0 for a turn that is alone
    in its state. The final reward is that of the last turn, as it was given: with γ < 1, of two
    ways to the same end the shorter is better.

    Source: GiGPO, arXiv 2505.10978, section 4.2; `scale=False` is its F = 1.

    >>> from fulmen.credit.assign import example
    >>> one, other = example(1.0, [("a", 0.0)]), example(0.0, [("a", 0.0)])
    >>> TurnGroups()([one, other])
    [[1.0], [-1.0]]
    """

    gamma: float = 1.0
    weight: float = 1.0
    """ω."""
    scale: bool = True
    """Divide by the standard deviation of the state's returns."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """One addend per transition of every trajectory."""
        returns = [discounted(self.gamma)(trajectory) for trajectory in trajectories]
        added = [[0.0] * len(own) for own in returns]
        for places in _meetings(trajectories).values():
            values = np.array([returns[i][k] for i, k in places], dtype=np.float64)
            if np.ptp(values) < EQUAL:
                continue
            compared = values - values.mean()
            if self.scale:
                compared /= values.std()
            for (i, k), value in zip(places, compared, strict=True):
                added[i][k] = self.weight * float(value)
        return added


def shared_states(trajectories: Sequence[Trajectory]) -> float:
    """The share of turns whose state at least two rollouts of their group were in; 0 without turns.

    Near 0, comparing turns says nothing beyond comparing rollouts.
    """
    meetings = _meetings(trajectories).values()
    turns = sum(len(places) for places in meetings)
    shared = sum(len(places) for places in meetings if len({i for i, _ in places}) > 1)
    return shared / turns if turns else 0.0


def _meetings(
    trajectories: Sequence[Trajectory],
) -> Mapping[tuple[str, str], list[tuple[int, int]]]:
    """(group, state) to (trajectory, transition) of every turn that was in it."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for i, trajectory in enumerate(trajectories):
        for k, transition in enumerate(trajectory.transitions):
            found[trajectory.group, transition.state].append((i, k))
    return found
