"""From graded rollouts to advantages: observe, apply rules, place rewards, assemble, credit."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from fulmen.credit.advantage import credit, share_with_signal
from fulmen.credit.air import apply_rules
from fulmen.credit.assign import CreditRule, identical
from fulmen.credit.baselines import Baseline, grpo, no_baseline
from fulmen.credit.critic import GAE, credit_with_critic
from fulmen.credit.detect import Predicate
from fulmen.credit.observe import Observed, observe
from fulmen.credit.overlong import Overlong
from fulmen.credit.rewards import Placed, homeless, own_rewards, place
from fulmen.credit.rules import Rule
from fulmen.credit.selection import Selector, every, unmatched
from fulmen.credit.tokens import TokenNumbers, TokenRule
from fulmen.credit.tools import OUTCOMES
from fulmen.credit.trajectory import Dropped, assemble, count_reasons
from fulmen.credit.turns import TurnGroups, shared_states
from fulmen.credit.whitening import Whitening, as_it_is
from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Credited, Reward, Trajectory, Transition
from fulmen.trainer.events import Note
from fulmen.trainer.grading import Graded
from fulmen.trainer.tasks import kind_of
from fulmen.trainer.weights import MAIN, UNWEIGHTED, Weights

SHOWN_AGENTS = 16
"""More agents than these are counted together: names made of prompts may be one for every task."""
OVERLONG = "overlong"
"""Name under which the punishment of a rollout that is too long is kept and shown."""


@dataclass(frozen=True, slots=True)
class Crediting:
    """How a run turns rewards into advantages."""

    rule: CreditRule = identical
    baseline: Baseline = grpo
    turns: TurnGroups | None = None
    tokens: TokenRule | None = None
    """Returns of single tokens, in the place of `rule`."""
    whitening: Whitening = as_it_is
    critic: GAE | None = None
    """Advantages from a critic's values, in the place of rule and baseline."""
    kl_coefficient: float = 0.0
    """β: what a nat of divergence from the reference is taken off a token's reward."""
    overlong: Overlong | None = None
    task_kind: str | None = None
    """Key of a task's metadata that names its kind; None: all tasks are of one."""
    rules: Sequence[Rule] = ()
    """Of automatic intermediate rewarding."""
    predicates: Mapping[str, Predicate] = field(default_factory=dict)
    weights: Weights = UNWEIGHTED
    selected: Selector = every
    patterns: Sequence[str] = ()
    """What `selected` looks for, if it looks for names."""
    policies: Sequence[str] = ()
    """Names of what is trained, as calls carry them, first that of agents without a policy of their
    own; empty: nothing else answers."""


TokenScorer = Callable[[Sequence[Transition]], TokenNumbers]
"""One number for each completion token of each transition: a forward pass of the learner."""


@dataclass(frozen=True, slots=True)
class Scorers:
    """What the learner can say of single tokens. None: it has no critic, or no reference."""

    values: TokenScorer | None = None
    """What the critic foresees just before each token."""
    kl: TokenScorer | None = None
    """Estimated divergence of the policy from the reference at each token, nats."""

    def check(self, how: Crediting) -> None:
        """Raises ConfigError if crediting needs what is not there."""
        if how.critic is not None and self.values is None:
            raise ConfigError("this advantage needs a critic", hint="choose one without, say grpo")
        if how.kl_coefficient and self.kl is None:
            raise ConfigError("kl_in_reward needs a reference policy", hint="leave it out")


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
    left_out: bool


NO_SCORERS = Scorers()


def credit_step(graded: Sequence[Graded], how: Crediting, scorers: Scorers = NO_SCORERS) -> Step:
    """Rewards to advantages. Every rollout with a reward is in its group's baseline, whether or not
    its calls can be trained, but for groups that are left out as a whole.

    Raises:
        GraderError: a predicate raised, or returned something that is no number.
        DataError: a reward is none, or a task does not say of which kind it is.
    """
    counted = [item for item in graded if item.reward is not None]
    items = [_read(item, item.reward, how) for item in counted if item.reward is not None]
    kept = [item.trajectory for item in items if not item.left_out]
    divergences = _divergences(kept, how, scorers)
    credited = _credit(kept, how, scorers, divergences)
    return Step(
        credited=credited,
        rewards=[reward for item in items for reward in item.ruled],
        metrics=_metrics(items, how)
        | _signal(items, kept, how)
        | _divergence_metrics(credited, divergences, how),
        notes=[
            *_unknown_agents(items, how),
            *_idle_policies(items, how),
            *_unknown_weights(counted, how),
        ],
    )


def credit_trajectories(
    trajectories: Sequence[Trajectory], how: Crediting, scorers: Scorers = NO_SCORERS
) -> list[Credited]:
    """Advantages of the trained calls of whole groups."""
    return _credit(trajectories, how, scorers, _divergences(trajectories, how, scorers))


def total_rewards(graded: Sequence[Graded], how: Crediting) -> list[float | None]:
    """Final and intermediate rewards of each rollout as they are used, added up; None without one.

    Raises:
        GraderError: as `credit_step`.
        DataError: as `credit_step`.
    """
    return [
        None if item.reward is None else _read(item, item.reward, how).trajectory.total
        for item in graded
    ]


def _divergences(
    trajectories: Sequence[Trajectory], how: Crediting, scorers: Scorers
) -> TokenNumbers | None:
    """k1 of every trained token, nats; None where it is no part of the reward."""
    scorers.check(how)
    if not how.kl_coefficient or scorers.kl is None:
        return None
    return scorers.kl(_trained(trajectories))


def _credit(
    trajectories: Sequence[Trajectory],
    how: Crediting,
    scorers: Scorers,
    divergences: TokenNumbers | None,
) -> list[Credited]:
    penalties = None
    if divergences is not None:
        penalties = [[how.kl_coefficient * kl for kl in own] for own in divergences]
    if how.critic is not None and scorers.values is not None:
        return credit_with_critic(
            trajectories,
            scorers.values(_trained(trajectories)),
            estimator=how.critic,
            penalties=penalties,
            whitening=how.whitening,
        )
    return credit(
        trajectories,
        rule=how.rule,
        baseline=how.baseline,
        turns=how.turns,
        tokens=how.tokens,
        penalties=penalties,
        whitening=how.whitening,
    )


def _trained(trajectories: Sequence[Trajectory]) -> list[Transition]:
    return [t for trajectory in trajectories for t in trajectory.transitions if t.trained]


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
        policies=how.policies,
    )
    if how.task_kind is not None:
        kind = kind_of(item.result.rollout.task, how.task_kind)
        trajectory = structs.replace(trajectory, kind=kind)
    if how.overlong is not None and (punishment := how.overlong(trajectory)):
        trajectory = structs.replace(trajectory, reward=trajectory.reward + punishment)
        ruled.append(
            Reward(
                rollout_id=trajectory.rollout_id,
                attempt=item.result.attempt,
                name=OVERLONG,
                value=punishment,
                source="rule",
            )
        )
    return _Item(observed, ruled, placed, trajectory, dropped, left_out=bool(item.left_out))


def _metrics(items: Sequence[_Item], how: Crediting) -> dict[str, float]:
    trajectories = [item.trajectory for item in items]
    dropped = [drop for item in items for drop in item.dropped]
    metrics = {
        "credit/shared_states": shared_states(trajectories),
        "credit/homeless_rewards": float(sum(homeless(i.placed, i.trajectory) for i in items)),
    }
    metrics |= {f"dropped/{why}": float(n) for why, n in count_reasons(dropped).items()}
    if items:
        metrics["reward/intermediate"] = math.fsum(i.placed.total for i in items) / len(items)
        names = {f"reward/air/{rule.reward_name}": rule.reward_name for rule in how.rules}
        names |= {f"reward/{OVERLONG}": OVERLONG} if how.overlong else {}
        for metric, name in names.items():
            values = [r.value for item in items for r in item.ruled if r.name == name]
            metrics[metric] = math.fsum(values) / len(items)
    outcomes = Counter(use.outcome for item in items for use in item.observed.tools)
    metrics |= {f"tools/{outcome}": float(outcomes[outcome]) for outcome in OUTCOMES if outcomes}
    return metrics | _agent_metrics(items)


def _signal(items: Sequence[_Item], kept: Sequence[Trajectory], how: Crediting) -> dict[str, float]:
    """The share of groups whose rewards say something, those left out among the others; nothing
    with a critic, which says something of every group."""
    if how.critic is not None:
        return {}
    # What is taken off for divergence says nothing of a task. Whitening moves the advantages of
    # groups without signal off 0; without a baseline it is what stands for one.
    whitening = how.whitening if how.baseline is no_baseline else as_it_is
    plain = _credit(kept, replace(how, whitening=whitening), NO_SCORERS, None)
    groups = {item.trajectory.group for item in items}
    return {"groups/with_signal": share_with_signal(groups, plain)}


def _divergence_metrics(
    credited: Sequence[Credited], divergences: TokenNumbers | None, how: Crediting
) -> dict[str, float]:
    """Mean divergence of the sampled tokens of each policy, where it is taken off the reward."""
    if divergences is None:
        return {}
    found: dict[str, list[float]] = {}
    for item, own in zip(credited, divergences, strict=True):
        policy = f"{item.transition.policy}/" if len(how.policies) > 1 else ""
        found.setdefault(f"learn/{policy}kl_reference", []).extend(own)
    return {name: math.fsum(own) / len(own) for name, own in found.items() if own}


def _agent_metrics(items: Sequence[_Item]) -> dict[str, float]:
    """Calls of every agent, which share of them can be trained and is selected for it, and which is
    trained: the same, but for groups that are left out."""
    selected = {t.call_id for item in items for t in item.trajectory.transitions if t.trained}
    calls: dict[str, list[tuple[bool, bool]]] = {}
    for item in items:
        for call in item.observed.calls:
            chosen = call.id in selected
            calls.setdefault(call.agent, []).append((chosen, chosen and not item.left_out))
    busiest = sorted(calls, key=lambda agent: (-len(calls[agent]), agent))
    shown = {agent: calls[agent] for agent in busiest[:SHOWN_AGENTS]}
    if others := [flags for agent in busiest[SHOWN_AGENTS:] for flags in calls[agent]]:
        shown["(others)"] = others
    metrics: dict[str, float] = {}
    for agent, flags in shown.items():
        chosen, trained = (sum(column) for column in zip(*flags, strict=True))
        metrics[f"agent/{agent}/calls"] = float(len(flags))
        metrics[f"agent/{agent}/selected"] = chosen / len(flags)
        metrics[f"agent/{agent}/trained"] = trained / len(flags)
    return metrics


def _unknown_agents(items: Sequence[_Item], how: Crediting) -> list[Note]:
    agents = sorted({call.agent for item in items for call in item.observed.calls})
    if not agents or not (missing := unmatched(how.patterns, agents)):
        return []
    text = f"no call of {_listed(missing)} in this step (train); agents seen: {_shown(agents)}"
    return [Note(level="warning", code="unknown-agent", text=text)]


def _idle_policies(items: Sequence[_Item], how: Crediting) -> list[Note]:
    calls = [call for item in items for call in item.observed.calls]
    sampled = {call.policy for call in calls}
    if not calls or not (missing := [name for name in how.policies[1:] if name not in sampled]):
        return []
    agents = sorted({call.agent for call in calls})
    text = (
        f"no call of policy {_listed(missing)} in this step; agents seen: {_shown(agents)} "
        "(an agent that only a span names must ask for the model of its policy's name)"
    )
    return [Note(level="warning", code="idle-policy", text=text)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _shown(agents: Sequence[str]) -> str:
    return ", ".join(agents[:SHOWN_AGENTS]) + (" …" if len(agents) > SHOWN_AGENTS else "")


def _unknown_weights(graded: Sequence[Graded], how: Crediting) -> list[Note]:
    seen = {MAIN} | {name for item in graded for name in item.parts}
    seen |= {reward.name for item in graded for reward in item.result.rewards}
    if not graded or not (missing := how.weights.unseen(seen)):
        return []
    text = (
        f"reward_weights names {_listed(missing)}, which nobody gave in this step; "
        f"given were: {', '.join(sorted(seen))}"
    )
    return [Note(level="warning", code="unknown-weight", text=text)]
