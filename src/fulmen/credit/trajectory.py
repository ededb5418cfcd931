"""What an attempt recorded, read as a trajectory of a Markov decision process.

Calls in, transitions out. A call that cannot be trained is not dropped in silence: it is returned
with the reason, and it does not take its rollout out of the statistics.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from fulmen.credit.observe import Observed, observe
from fulmen.credit.rewards import NOTHING, Placed
from fulmen.credit.selection import Selector, every
from fulmen.credit.turns import state_of
from fulmen.schema.records import Call, RolloutResult, Trajectory, Transition

DropReason = Literal[
    "refused", "superseded", "other_model", "no_tokens", "no_logprobs", "aborted", "greedy"
]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A call that is not trained, and why."""

    call_id: str
    reason: DropReason


def assemble(
    result: RolloutResult,
    reward: float,
    *,
    observed: Observed | None = None,
    placed: Placed = NOTHING,
    selected: Selector = every,
    policies: Collection[str] = (),
) -> tuple[Trajectory, list[Dropped]]:
    """Read the calls of a rollout's last attempt as transitions, in order of arrival.

    Args:
        result: the finished rollout.
        reward: its final reward, already decided (grader, agent or failure policy).
        observed: what `observe` says of it, if that was asked already.
        placed: intermediate rewards. An agent's own is given to its last transition; that of a call
            that is dropped goes nowhere (`rewards.homeless` counts them).
        selected: which calls are trained; the others are there for the order of things.
        policies: names of those that are trained; calls that another model answered are dropped.
            Empty: no other model answers.
    """
    observed = observed or observe(result)
    calls = {call.id: call for call in observed.calls}
    transitions: list[Transition] = []
    dropped: list[Dropped] = []
    for call in observed.calls:
        reason = _untrainable(call, policies)
        if reason is not None:
            dropped.append(Dropped(call.id, reason))
            continue
        own = placed.calls.get(call.id, 0.0)
        parent = calls.get(call.parent or "")
        transitions.append(_transition(call, own, state_of(call, parent), trained=selected(call)))
    for agent, value in placed.agents.items():
        _reward_last(transitions, agent, value)
    return (
        Trajectory(
            rollout_id=result.rollout.id,
            group=result.rollout.group,
            transitions=tuple(transitions),
            reward=reward,
            intermediate=placed.rollout,
        ),
        dropped,
    )


def _reward_last(transitions: list[Transition], agent: str, value: float) -> None:
    own = [place for place, transition in enumerate(transitions) if transition.agent == agent]
    if own:
        latest = transitions[own[-1]]
        transitions[own[-1]] = structs.replace(latest, reward=latest.reward + value)


def _untrainable(call: Call, policies: Collection[str]) -> DropReason | None:
    if call.status >= 400:
        return "refused"
    if call.superseded:
        return "superseded"
    if policies and call.policy not in policies:
        return "other_model"
    if not call.completion_ids:
        return "no_tokens"
    if len(call.logprobs) != len(call.completion_ids):
        return "no_logprobs"
    if call.finish_reason == "abort":
        return "aborted"
    # A greedy choice was not sampled: it has no probability to push up or down.
    if call.temperature == 0:
        return "greedy"
    return None


def _transition(call: Call, reward: float, state: str, *, trained: bool) -> Transition:
    return Transition(
        rollout_id=call.rollout_id,
        call_id=call.id,
        agent=call.agent,
        prompt_ids=call.prompt_ids,
        completion_ids=call.completion_ids,
        logprobs=call.logprobs,
        temperature=call.temperature,
        grammar=call.grammar,
        policy=call.policy,
        version=call.version,
        reward=reward,
        state=state,
        trained=trained,
    )


def count_reasons(dropped: Iterable[Dropped]) -> dict[str, int]:
    """How many calls were dropped for each reason.

    >>> count_reasons([Dropped("c1", "aborted"), Dropped("c2", "aborted")])
    {'aborted': 2}
    """
    counts: dict[str, int] = {}
    for drop in dropped:
        counts[drop.reason] = counts.get(drop.reason, 0) + 1
    return counts
