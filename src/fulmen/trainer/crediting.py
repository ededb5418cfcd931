"""From graded rollouts to advantages: observe, apply rules, place rewards, assemble, credit."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fulmen.credit.advantage import credit, share_with_signal
from fulmen.credit.air import apply_rules
from fulmen.credit.assign import CreditRule, identical
from fulmen.credit.baselines import Baseline, grpo
from fulmen.credit.detect import Predicate
from fulmen.credit.observe import Observed, observe
from fulmen.credit.rewards import Placed, homeless, own_rewards, place
from fulmen.credit.rules import Rule
from fulmen.credit.selection import Selector, every, unmatched
from fulmen.credit.tools import OUTCOMES
from fulmen.credit.trajectory import Dropped, assemble, count_reasons
from fulmen.credit.turns import TurnGroups, shared_states
from fulmen.schema.records import Credited, Reward, Trajectory
from fulmen.trainer.events import Note
from fulmen.trainer.grading import Graded
from fulmen.trainer.weights import MAIN, UNWEIGHTED, Weights

SHOWN_AGENTS = 16
"""More agents than these are counted together: names made of prompts may be one for every task."""


@dataclass(frozen=True, slots=True)
class Crediting:
    """How a run turns rewards into advantages."""

    rule: CreditRule = identical
    baseline: Baseline = grpo
    turns: TurnGroups | None = None
    rules: Sequence[Rule] = ()
    """Of automatic intermediate rewarding."""
    predicates: Mapping[str, Predicate] = field(default_factory=dict)
    weights: Weights = UNWEIGHTED
    selected: Selector = every
    patterns: Sequence[str] = ()
    """What `selected` looks for, if it looks for names."""
    policy: str | None = None
    """Name of what is trained, as calls carry it; None: nothing else answers."""


@dataclass(frozen=True, slots=True)
class Step:
    """What crediting the rollouts of a step gives."""

    credited: list[Credited]
    rewards: list[Reward]
    """Those of rules, for the store."""
    metrics: dict[str, float]
    notes: list[Note]


@dataclass(frozen=True, slots=True)
class _Item:
    """One rollout on its way."""

    observed: Observed
    ruled: list[Reward]
    placed: Placed
    trajectory: Trajectory
    dropped: list[Dropped]


def credit_step(graded: Sequence[Graded], how: Crediting) -> Step:
    """Rewards to advantages. Every rollout with a reward is in its group's baseline, whether or not
    its calls can be trained.

    Raises:
        GraderError: a predicate raised, or returned something that is no number.
    """
    counted = [item for item in graded if item.reward is not None]
    items = [_read(item, item.reward, how) for item in counted if item.reward is not None]
    trajectories = [item.trajectory for item in items]
    credited = credit(trajectories, rule=how.rule, baseline=how.baseline, turns=how.turns)
    return Step(
        credited=credited,
        rewards=[reward for item in items for reward in item.ruled],
        metrics=_metrics(items, how),
        notes=[*_unknown_agents(items, how), *_unknown_weights(counted, how)],
    )


def _read(item: Graded, reward: float, how: Crediting) -> _Item:
    observed = observe(item.result)
    ruled = apply_rules(how.rules, observed, how.predicates)
    placed = place([*ruled, *own_rewards(item.result)], observed, how.weights.values)
    trajectory, dropped = assemble(
        item.result,
        reward,
        observed=observed,
        placed=placed,
        selected=how.selected,
        policy=how.policy,
    )
    return _Item(observed, ruled, placed, trajectory, dropped)


def _metrics(items: Sequence[_Item], how: Crediting) -> dict[str, float]:
    trajectories = [item.trajectory for item in items]
    dropped = [drop for item in items for drop in item.dropped]
    metrics = {
        "groups/with_signal": share_with_signal(trajectories),
        "credit/shared_states": shared_states(trajectories),
        "credit/homeless_rewards": float(sum(homeless(i.placed, i.trajectory) for i in items)),
    }
    metrics |= {f"dropped/{why}": float(n) for why, n in count_reasons(dropped).items()}
    if items:
        metrics["reward/intermediate"] = math.fsum(i.placed.total for i in items) / len(items)
        for name in [rule.reward_name for rule in how.rules]:
            values = [r.value for item in items for r in item.ruled if r.name == name]
            metrics[f"reward/air/{name}"] = math.fsum(values) / len(items)
    outcomes = Counter(use.outcome for item in items for use in item.observed.tools)
    metrics |= {f"tools/{outcome}": float(outcomes[outcome]) for outcome in OUTCOMES if outcomes}
    return metrics | _agent_metrics(items)


def _agent_metrics(items: Sequence[_Item]) -> dict[str, float]:
    """Calls of every agent, and which share of them is trained."""
    trained = {t.call_id for item in items for t in item.trajectory.transitions if t.trained}
    calls: dict[str, list[bool]] = {}
    for item in items:
        for call in item.observed.calls:
            calls.setdefault(call.agent, []).append(call.id in trained)
    busiest = sorted(calls, key=lambda agent: (-len(calls[agent]), agent))
    shown = {agent: calls[agent] for agent in busiest[:SHOWN_AGENTS]}
    if others := [flag for agent in busiest[SHOWN_AGENTS:] for flag in calls[agent]]:
        shown["(others)"] = others
    return {f"agent/{agent}/calls": float(len(flags)) for agent, flags in shown.items()} | {
        f"agent/{agent}/trained": sum(flags) / len(flags) for agent, flags in shown.items()
    }


def _unknown_agents(items: Sequence[_Item], how: Crediting) -> list[Note]:
    agents = sorted({call.agent for item in items for call in item.observed.calls})
    if not agents or not (missing := unmatched(how.patterns, agents)):
        return []
    seen = ", ".join(agents[:SHOWN_AGENTS]) + (" …" if len(agents) > SHOWN_AGENTS else "")
    text = f"no call of {', '.join(map(repr, missing))} in this step (train); agents seen: {seen}"
    return [Note(level="warning", code="unknown-agent", text=text)]


def _unknown_weights(graded: Sequence[Graded], how: Crediting) -> list[Note]:
    seen = {MAIN} | {name for item in graded for name in item.parts}
    seen |= {reward.name for item in graded for reward in item.result.rewards}
    if not graded or not (missing := how.weights.unseen(seen)):
        return []
    text = (
        f"reward_weights names {', '.join(map(repr, missing))}, which nobody gave in this step; "
        f"given were: {', '.join(sorted(seen))}"
    )
    return [Note(level="warning", code="unknown-weight", text=text)]
