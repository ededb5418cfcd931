"""Credit assignment: the rewards of a trajectory become one return per transition.

A rule is a plain function `Trajectory -> list of returns`, one per transition, in their order.
Every rule is linear in the rewards, so it does not matter whether a baseline is taken off the final
reward before the rule or off the returns after it; `credit.advantage` takes it off before.

In the formulas the trajectory has T transitions t = 0 … T−1, R is its final reward with the
intermediate rewards of the rollout as a whole, and r_t is the reward of transition t itself.
Transitions that are not trained keep their place in the order.
"""

import math
from collections.abc import Callable

from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Trajectory

CreditRule = Callable[[Trajectory], list[float]]


def identical(trajectory: Trajectory) -> list[float]:
    """R + Σ_k r_k for every call.

    Source: LightningRL's default, arXiv 2508.03680, section 3.2.

    >>> identical(example(0.5, [("a", 0.0), ("a", 0.25)]))
    [0.75, 0.75]
    """
    total = _final(trajectory) + math.fsum(t.reward for t in trajectory.transitions)
    return [total] * len(trajectory.transitions)


def last(trajectory: Trajectory) -> list[float]:
    """r_t, and R for the last trained call: the one that gave the answer.

    >>> last(example(1.0, [("a", 0.25), ("a", 0.5)]))
    [0.25, 1.5]
    """
    returns = [t.reward for t in trajectory.transitions]
    trained = [place for place, t in enumerate(trajectory.transitions) if t.trained]
    if trained:
        returns[trained[-1]] += _final(trajectory)
    return returns


def discounted(gamma: float) -> CreditRule:
    """γ^(T−1−t)·R + Σ_{k≥t} γ^(k−t)·r_k: what is yet to come, worth less the farther off it is.

    Source: R. Sutton and A. Barto, Reinforcement Learning, 2nd edition, equation 3.8.

    Raises:
        ConfigError: `gamma` is not in (0, 1].

    >>> discounted(0.5)(example(1.0, [("a", 0.0), ("a", 0.5), ("a", 0.0)]))
    [0.5, 1.0, 1.0]
    """
    if not 0 < gamma <= 1:
        raise ConfigError(f"discount is {gamma}", hint="give a number above 0, at most 1")

    def rule(trajectory: Trajectory) -> list[float]:
        returns: list[float] = []
        later = _final(trajectory)
        for transition in reversed(trajectory.transitions):
            # The final reward comes with the last transition: it is not discounted there.
            later = transition.reward + (gamma * later if returns else later)
            returns.append(later)
        return returns[::-1]

    return rule


def reward_to_go(trajectory: Trajectory) -> list[float]:
    """R + Σ_{k≥t} r_k: a call has no part in rewards that came before it.

    >>> reward_to_go(example(1.0, [("a", 0.25), ("a", 0.5)]))
    [1.75, 1.5]
    """
    return discounted(1.0)(trajectory)


def per_agent(trajectory: Trajectory) -> list[float]:
    """R + Σ r_k over the calls of the same agent: nobody earns by another agent's tools.

    >>> per_agent(example(1.0, [("writer", 0.25), ("checker", -0.5), ("writer", 0.0)]))
    [1.25, 0.5, 1.25]
    """
    final = _final(trajectory)
    own: dict[str, float] = {}
    for transition in trajectory.transitions:
        own[transition.agent] = own.get(transition.agent, 0.0) + transition.reward
    return [final + own[transition.agent] for transition in trajectory.transitions]


def _final(trajectory: Trajectory) -> float:
    return trajectory.reward + trajectory.intermediate


def example(reward: float, calls: list[tuple[str, float]]) -> Trajectory:
    """A trajectory for the examples here: calls as (agent, own reward), each of one token."""
    from fulmen.schema.records import Transition

    return Trajectory(
        rollout_id="r",
        group="g",
        reward=reward,
        transitions=tuple(
            Transition(
                rollout_id="r",
                call_id=f"c{place}",
                agent=agent,
                prompt_ids=(1,),
                completion_ids=(2,),
                logprobs=(-0.1,),
                temperature=1.0,
                version=0,
                reward=own,
            )
            for place, (agent, own) in enumerate(calls)
        ),
    )
