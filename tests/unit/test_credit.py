"""From calls to transitions, and from the reward of a rollout to the advantage of each call."""

import pytest

from fulmen.credit.advantage import credit, share_with_signal
from fulmen.credit.trajectory import assemble
from fulmen.schema.records import (
    Call,
    Outcome,
    Rollout,
    RolloutResult,
    Task,
    Trajectory,
    Transition,
    VersionSpan,
)


def call(index: int, **changes) -> Call:
    values = {
        "id": f"c{index}",
        "rollout_id": "r",
        "attempt": 1,
        "index": index,
        "protocol": "chat",
        "prompt_ids": (1, 2),
        "completion_ids": (3, 4),
        "logprobs": (-0.5, -0.25),
        "versions": (VersionSpan(start=0, version=7),),
        "temperature": 1.0,
        "top_p": 1.0,
        "finish_reason": "stop",
    }
    return Call(**(values | changes))


def result(*calls: Call) -> RolloutResult:
    rollout = Rollout(id="r", task=Task(id="t", input=None), group="g", step=1)
    return RolloutResult(rollout=rollout, attempt=1, outcome=Outcome(), calls=calls)


def trajectory(group: str, reward: float, calls: int = 1) -> Trajectory:
    transition = Transition(
        rollout_id=f"{group}{reward}",
        call_id="c",
        agent="agent",
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(-1.0,),
        temperature=1.0,
        version=0,
    )
    return Trajectory(
        rollout_id=f"{group}{reward}", group=group, transitions=(transition,) * calls, reward=reward
    )


def test_a_talkative_rollout_weighs_no_more_than_a_terse_one_in_the_baseline():
    """The example of the reference notes: rewards (1, 0, 0, 0) with 12, 3, 3 and 3 calls."""
    group = [trajectory("g", 1.0, 12), *(trajectory("g", 0.0, 3) for _ in range(3))]
    credited = credit(group)
    assert len(credited) == 21
    assert credited[0].advantage == pytest.approx(3**0.5)
    assert credited[-1].advantage == pytest.approx(-1 / 3**0.5)


def test_a_rollout_without_trainable_calls_still_counts_in_the_baseline():
    silent = Trajectory(rollout_id="s", group="g", transitions=(), reward=0.0)
    (only,) = credit([trajectory("g", 1.0), silent])
    assert only.advantage == pytest.approx(1.0)


def test_a_rule_moves_the_advantage_of_its_calls_only():
    both = [trajectory("g", 1.0, 2), trajectory("g", 0.0, 2)]

    def last_only(t):
        return [0.0] * (len(t.transitions) - 1) + [t.reward]

    plain, ruled = credit(both), credit(both, rule=last_only)
    moved = [p.advantage != r.advantage for p, r in zip(plain, ruled, strict=True)]
    assert moved == [True, False, True, False]
    assert [item.advantage for item in ruled] == [0.0, 1.0, 0.0, -1.0]


def test_groups_whose_rewards_differ_are_the_share_with_signal():
    group = [trajectory("a", 0.0), trajectory("a", 1.0), trajectory("b", 1.0)]
    assert share_with_signal({"a", "b"}, credit(group)) == 0.5
    assert share_with_signal(set(), []) == 0.0


def test_every_call_becomes_a_transition_with_exactly_what_was_sampled():
    got, dropped = assemble(result(call(0), call(1, prompt_ids=(1, 2, 3, 4, 9))), 0.5)
    assert dropped == []
    assert [t.prompt_ids for t in got.transitions] == [(1, 2), (1, 2, 3, 4, 9)]
    assert got.transitions[0].logprobs == (-0.5, -0.25)
    assert got.transitions[0].version == 7
    assert got.reward == 0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completion_ids": (), "logprobs": (), "versions": ()}, "no_tokens"),
        ({"logprobs": ()}, "no_logprobs"),
        ({"finish_reason": "abort"}, "aborted"),
        ({"superseded": True}, "superseded"),
        ({"temperature": 0.0}, "greedy"),
        ({"policy": "checker"}, "other_model"),
        (
            {"status": 400, "completion_ids": (), "logprobs": (), "versions": (), "policy": ""},
            "refused",
        ),
    ],
)
def test_a_call_that_cannot_be_trained_is_named_with_its_reason(changes, reason):
    own, other = call(0, policy="p"), call(1, **{"policy": "p", **changes})
    got, dropped = assemble(result(own, other), 1.0, policies=["p"])
    assert [t.call_id for t in got.transitions] == ["c0"]
    assert [(d.call_id, d.reason) for d in dropped] == [("c1", reason)]
