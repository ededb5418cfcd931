"""What an attempt recorded, read as a trajectory of a Markov decision process.

Calls in, transitions out. A call that cannot be trained is not dropped in silence: it is returned
with the reason, and it does not take its rollout out of the statistics.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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
    result: RolloutResult, reward: float, *, policy: str | None = None
) -> tuple[Trajectory, list[Dropped]]:
    """Read the calls of a rollout's last attempt as transitions, in order of arrival.

    `reward` is the final reward of the rollout, already decided (grader, agent or failure policy).
    `policy` names the one that is trained: calls that another model answered are dropped. None:
    they are all its own.
    """
    kept: list[Call] = []
    dropped: list[Dropped] = []
    for call in result.calls:
        reason = _untrainable(call, policy)
        if reason is None:
            kept.append(call)
        else:
            dropped.append(Dropped(call.id, reason))
    return (
        Trajectory(
            rollout_id=result.rollout.id,
            group=result.rollout.group,
            transitions=tuple(_transition(call) for call in kept),
            reward=reward,
        ),
        dropped,
    )


def _untrainable(call: Call, policy: str | None) -> DropReason | None:
    if call.status >= 400:
        return "refused"
    if call.superseded:
        return "superseded"
    if policy is not None and call.policy != policy:
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


def _transition(call: Call) -> Transition:
    return Transition(
        rollout_id=call.rollout_id,
        call_id=call.id,
        agent="agent",
        prompt_ids=call.prompt_ids,
        completion_ids=call.completion_ids,
        logprobs=call.logprobs,
        temperature=call.temperature,
        grammar=call.grammar,
        version=call.version,
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
