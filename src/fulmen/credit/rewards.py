"""Where intermediate rewards belong: to a call, to an agent, or to the rollout as a whole."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fulmen.credit.observe import Observed
from fulmen.schema.records import Reward, RolloutResult, Trajectory


@dataclass(frozen=True, slots=True)
class Placed:
    """Intermediate rewards of a rollout, weighted and summed by what they were given to."""

    calls: Mapping[str, float] = field(default_factory=dict)
    agents: Mapping[str, float] = field(default_factory=dict)
    rollout: float = 0.0

    @property
    def total(self) -> float:
        """Everything together."""
        return math.fsum([*self.calls.values(), *self.agents.values(), self.rollout])


NOTHING = Placed()


def place(
    rewards: Iterable[Reward], observed: Observed, weights: Mapping[str, float] | None = None
) -> Placed:
    """Sum rewards by what they were given to, each times the weight of its name (1 if it has none).

    A tool call's id stands for the call that asked for the tool. A reward of a span is that of the
    one call that the span is about; if there is none, of the agent the span belongs to; if that is
    unknown too, of the rollout.

    >>> given = Reward(rollout_id="r", attempt=1, name="found", value=0.5, source="agent")
    >>> place([given], Observed("r", 1, ()), {"found": 0.1}).rollout
    0.05
    """
    calls: dict[str, float] = defaultdict(float)
    agents: dict[str, float] = defaultdict(float)
    rollout = 0.0
    asked_by = {use.tool_call_id: use.call_id for use in observed.tools if use.tool_call_id}
    for reward in rewards:
        value = reward.value * (weights or {}).get(reward.name, 1.0)
        span = reward.span_id or ""
        call = asked_by.get(reward.call_id or "") or reward.call_id or observed.call_of.get(span)
        agent = reward.agent or observed.agent_of.get(span)
        if call:
            calls[call] += value
        elif agent:
            agents[agent] += value
        else:
            rollout += value
    return Placed(dict(calls), dict(agents), rollout)


def own_rewards(result: RolloutResult) -> list[Reward]:
    """What the agent gave itself on the way (`fulmen.reward`)."""
    return [reward for reward in result.rewards if reward.source == "agent"]


def homeless(placed: Placed, trajectory: Trajectory) -> int:
    """How many calls and agents with a reward have no transition that could earn it."""
    calls = {transition.call_id for transition in trajectory.transitions}
    agents = {transition.agent for transition in trajectory.transitions}
    return sum(bool(value) and name not in calls for name, value in placed.calls.items()) + sum(
        bool(value) and name not in agents for name, value in placed.agents.items()
    )
