"""Credit assignment: the rewards of a trajectory become one return per transition.

A rule is a plain function `Trajectory -> list of returns`, one per transition, in their order.
"""

from collections.abc import Callable

from fulmen.schema.records import Trajectory

CreditRule = Callable[[Trajectory], list[float]]


def identical(trajectory: Trajectory) -> list[float]:
    """Every call earns the final reward of its rollout.

    Source: LightningRL's default, arXiv 2508.03680, section 3.2.

    >>> from fulmen.schema.records import Transition
    >>> call = Transition(rollout_id="r", call_id="c", agent="a", prompt_ids=(1,),
    ...     completion_ids=(2,), logprobs=(-0.1,), temperature=1.0, version=0)
    >>> identical(Trajectory(rollout_id="r", group="g", transitions=(call, call), reward=0.5))
    [0.5, 0.5]
    """
    return [trajectory.reward] * len(trajectory.transitions)
