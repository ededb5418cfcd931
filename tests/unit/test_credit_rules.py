"""Credit rules, turns in the same state, and where intermediate rewards go."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from attempts import agent_span, answer_span, asks, call, own_reward, result, tool_span
from fulmen.credit.advantage import credit, share_with_signal
from fulmen.credit.assign import discounted, example, identical, last, per_agent, reward_to_go
from fulmen.credit.baselines import group_mean, grpo
from fulmen.credit.observe import observe
from fulmen.credit.rewards import Placed, homeless, own_rewards, place
from fulmen.credit.selection import by_name
from fulmen.credit.trajectory import assemble
from fulmen.credit.turns import TurnGroups, shared_states
from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Trajectory

RULES = {
    "identical": identical,
    "last": last,
    "discounted": discounted(0.5),
    "reward-to-go": reward_to_go,
    "per-agent": per_agent,
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))

numbers = st.floats(-5, 5, width=32)
calls = st.lists(st.tuples(st.sampled_from(["writer", "checker"]), numbers), max_size=6)


def states(trajectory: Trajectory, *names: str) -> Trajectory:
    """The trajectory with these states, turn by turn."""
    pairs = zip(trajectory.transitions, names, strict=True)
    return replace(trajectory, transitions=tuple(replace(t, state=name) for t, name in pairs))


def advantages(*trajectories: Trajectory, **options) -> list[float]:
    return [item.advantage for item in credit(trajectories, **options)]


@pytest.mark.parametrize(
    ("name", "returns"),
    [
        ("identical", [1.75, 1.75, 1.75]),
        ("last", [0.5, -0.25, 1.5]),
        ("discounted", [0.25 + 0.5 - 0.125 + 0.125, 0.5 - 0.25 + 0.25, 1.5]),
        ("reward-to-go", [1.75, 1.25, 1.5]),
        ("per-agent", [2.0, 0.75, 2.0]),
    ],
)
def test_each_rule_on_one_trajectory_by_hand(name, returns):
    trajectory = example(1.0, [("writer", 0.5), ("checker", -0.25), ("writer", 0.5)])
    assert RULES[name](trajectory) == returns


@rules
def test_rewards_of_the_rollout_as_a_whole_come_with_its_final_one(rule):
    whole = replace(example(1.0, [("a", 0.5), ("b", 0.0)]), intermediate=0.25)
    assert rule(whole) == rule(example(1.25, [("a", 0.5), ("b", 0.0)]))


@rules
@given(calls, numbers, numbers, st.floats(-3, 3, width=32), st.data())
def test_every_rule_is_linear_in_the_rewards(rule, one, final, other_final, factor, data):
    own = data.draw(st.lists(numbers, min_size=len(one), max_size=len(one)))
    other = [(agent, reward) for (agent, _), reward in zip(one, own, strict=True)]
    both = [(agent, a + factor * b) for (agent, a), b in zip(one, own, strict=True)]
    together = rule(example(final + factor * other_final, both))
    apart = np.array(rule(example(final, one))) + factor * np.array(
        rule(example(other_final, other))
    )
    np.testing.assert_allclose(together, apart, rtol=1e-6, atol=1e-6)


@rules
def test_a_trajectory_without_calls_has_no_returns(rule):
    assert rule(example(1.0, [])) == []


@pytest.mark.parametrize("gamma", [0.0, -0.5, 1.5, math.nan])
def test_a_discount_outside_its_range_is_refused(gamma):
    with pytest.raises(ConfigError, match="discount is"):
        discounted(gamma)


groups = st.lists(
    st.tuples(numbers, st.sampled_from("ab"), st.integers(0, 4)), min_size=1, max_size=10
)


@pytest.mark.parametrize("baseline", [grpo, group_mean])
@given(groups)
def test_identical_credit_is_the_advantage_of_the_rollout_to_the_last_bit(baseline, drawn):
    trajectories = [
        replace(example(reward, [("a", 0.0)] * count), group=group)
        for reward, group, count in drawn
    ]
    whole = baseline(np.array([r for r, _, _ in drawn]), [g for _, g, _ in drawn]).values
    wanted = [float(a) for a, (_, _, n) in zip(whole, drawn, strict=True) for _ in range(n)]
    assert advantages(*trajectories, baseline=baseline) == wanted


@given(groups, st.integers(0, 9))
def test_how_many_calls_a_rollout_makes_changes_nothing_for_the_others(drawn, more):
    def of(extra: int) -> list[float]:
        counts = [n + (extra if place == 0 else 0) for place, (_, _, n) in enumerate(drawn)]
        trajectories = [
            replace(example(reward, [("a", 0.0)] * count), group=group)
            for (reward, group, _), count in zip(drawn, counts, strict=True)
        ]
        return advantages(*trajectories)[counts[0] :]

    assert of(0) == of(more)


def test_last_gives_all_calls_but_the_last_exactly_nothing():
    good, bad = example(1.0, [("a", 0.0)] * 3), example(0.0, [("a", 0.0)] * 2)
    assert advantages(good, bad, rule=last) == [0.0, 0.0, 1.0, 0.0, -1.0]


def test_the_last_call_is_the_last_trained_one():
    good = example(1.0, [("writer", 0.0), ("writer", 0.0), ("checker", 0.0)])
    untrained = replace(good.transitions[2], trained=False)
    good = replace(good, transitions=(*good.transitions[:2], untrained))
    assert advantages(good, example(0.0, []), rule=last) == [0.0, 1.0]


def test_calls_of_untrained_agents_are_counted_in_the_discount_and_not_returned():
    good = example(1.0, [("writer", 0.0), ("checker", 0.5), ("writer", 0.0)])
    middle = replace(good.transitions[1], trained=False)
    good = replace(good, transitions=(good.transitions[0], middle, good.transitions[2]))
    credited = credit([good, example(0.0, [])], rule=discounted(0.5))
    assert [item.transition.call_id for item in credited] == ["c0", "c2"]
    # The own reward of 0.5 is 1.0 on the scale of the group, whose deviation is 0.5.
    assert [item.advantage for item in credited] == [0.25 + 0.5, 1.0]


def test_intermediate_rewards_are_scaled_with_the_group_and_not_centred():
    pair = example(1.0, [("a", 0.25), ("a", 0.0)]), example(0.0, [("a", 0.25), ("a", 0.0)])
    assert advantages(*pair, rule=last) == [0.5, 1.0, 0.5, -1.0]
    assert advantages(*pair, rule=last, baseline=group_mean) == [0.25, 0.5, 0.25, -0.5]


def test_where_all_final_rewards_are_equal_intermediate_ones_keep_their_size():
    pair = example(1.0, [("a", 0.25)]), example(1.0, [("a", 0.0)])
    assert advantages(*pair) == [0.25, 0.0]
    assert share_with_signal({"g"}, credit(pair)) == 1.0
    assert share_with_signal({"g"}, credit([example(1.0, [("a", 0.0)])] * 2)) == 0.0


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("identical", [True, True, True]),
        ("last", [False, True, False]),
        ("discounted", [True, True, False]),
        ("reward-to-go", [True, True, False]),
        ("per-agent", [False, True, False]),
    ],
)
def test_changing_one_calls_reward_changes_what_the_rule_says_and_nothing_else(name, moved):
    agents = ("writer", "checker", "writer")
    plain = example(1.0, [(agent, 0.0) for agent in agents])
    middle = replace(plain.transitions[1], reward=0.3)
    changed = replace(plain, transitions=(plain.transitions[0], middle, plain.transitions[2]))
    rival = example(0.0, [("writer", 0.0), ("checker", 0.0)])
    before = advantages(plain, rival, rule=RULES[name])
    after = advantages(changed, rival, rule=RULES[name])
    assert [a != b for a, b in zip(before, after, strict=True)] == [*moved, False, False]


def test_turns_in_the_same_state_are_compared_with_each_other():
    """Two rollouts part at the second turn and meet again; by hand from GiGPO's formulas."""
    won = states(example(1.0, [("a", 0.0)] * 2), "start", "seen 4")
    lost = states(example(0.0, [("a", 0.0)] * 2), "start", "seen 5")
    late = states(example(1.0, [("a", 0.0)] * 3), "start", "seen 5", "seen 4")
    turns = TurnGroups(gamma=0.5, weight=2.0, scale=False)([won, lost, late])
    start = np.array([0.5, 0.0, 0.25]) - 0.25
    met = np.array([0.0, 0.5]) - 0.25
    assert [own[0] for own in turns] == pytest.approx(2 * start)
    assert turns[0][1] == turns[2][2] == 0.0
    assert [turns[1][1], turns[2][1]] == pytest.approx(2 * met)


def test_comparing_turns_is_added_to_the_advantage_of_the_rollout():
    won = states(example(1.0, [("a", 0.0)] * 2), "start", "seen 4")
    lost = states(example(0.0, [("a", 0.0)] * 2), "start", "seen 5")
    assert advantages(won, lost, turns=TurnGroups(weight=0.5)) == [1.5, 1.0, -1.5, -1.0]


def test_turns_are_never_compared_across_groups():
    other = replace(example(0.0, [("a", 0.0)]), group="other")
    assert TurnGroups()([example(1.0, [("a", 0.0)]), other]) == [[0.0], [0.0]]


def test_the_share_of_shared_states_counts_turns_that_two_rollouts_were_in():
    one = states(example(1.0, [("a", 0.0)] * 3), "start", "twice", "twice")
    two = states(example(0.0, [("a", 0.0)]), "start")
    assert shared_states([one, two]) == 0.5
    assert shared_states([]) == 0.0


def test_a_state_is_what_the_agent_was_shown_since_it_last_spoke():
    first = call(0, agent="a", prompt_ids=(1, 2), completion_ids=(3,), logprobs=(-1.0,))
    other = call(0, agent="a", prompt_ids=(1, 2), completion_ids=(4,), logprobs=(-1.0,))
    shown = call(1, agent="a", parent="c0", prompt_ids=(1, 2, 3, 9, 9))
    same = call(1, agent="a", parent="c0", prompt_ids=(1, 2, 4, 9, 9))
    else_shown = call(1, agent="a", parent="c0", prompt_ids=(1, 2, 4, 8))
    someone = call(1, agent="b", parent="c0", prompt_ids=(1, 2, 4, 9, 9))
    orphan = call(1, agent="a", prompt_ids=(9, 9))

    def names(*both):
        return [t.state for t in assemble(result(*both), 0.0)[0].transitions]

    assert names(first, shown) == names(other, same)
    second = [names(first, one)[1] for one in (shown, else_shown, someone)]
    assert len(set(second)) == 3
    assert names(first, orphan)[1] == second[0]
    assert names(call(0, agent="a", prompt_ids=(5,)))[0] != names(first)[0]


def test_rewards_find_the_call_the_agent_or_the_rollout_they_were_given_to():
    spans = [
        agent_span("root", "team"),
        answer_span("s", "c0", "root"),
        tool_span("t", "add", "root", call_id="call_1"),
    ]
    seen = observe(result(call(0, response=asks(("call_1", "add", "{}"))), spans=spans))
    given_rewards = [
        own_reward(1.0, call_id="c0"),
        own_reward(2.0, span_id="s"),
        own_reward(4.0, span_id="t"),
        own_reward(8.0, span_id="root"),
        own_reward(16.0, agent="team"),
        own_reward(32.0, span_id="of nobody"),
        own_reward(64.0, "named"),
    ]
    placed = place(given_rewards, seen, {"named": 0.5})
    assert placed == Placed({"c0": 7.0}, {"team": 24.0}, 64.0)
    assert placed.total == 95.0


def test_only_what_the_agent_gave_itself_counts_as_its_reward():
    graded = replace(own_reward(1.0), source="grader")
    mine = own_reward(0.5, "mine")
    assert own_rewards(result(rewards=[graded, mine])) == [mine]


def test_an_agents_reward_is_that_of_its_last_call_and_a_dropped_calls_goes_nowhere():
    attempt = result(
        call(0, agent="writer"),
        call(1, agent="checker"),
        call(2, agent="writer", finish_reason="abort"),
    )
    placed = Placed({"c1": 0.5, "c2": 0.25}, {"writer": 1.0, "absent": 1.0}, 0.125)
    trajectory, dropped = assemble(attempt, 0.0, placed=placed)
    assert [(t.call_id, t.reward) for t in trajectory.transitions] == [("c0", 1.0), ("c1", 0.5)]
    assert trajectory.intermediate == 0.125
    assert [d.call_id for d in dropped] == ["c2"]
    assert homeless(placed, trajectory) == 2


def test_agents_that_are_not_selected_stay_in_the_trajectory_untrained():
    attempt = result(*(call(n, agent=name) for n, name in enumerate(["writer", "checker", "rewr"])))
    trajectory, dropped = assemble(attempt, 1.0, selected=by_name(["writer", "re*"]))
    assert [t.trained for t in trajectory.transitions] == [True, False, True]
    assert dropped == []


def test_transitions_keep_the_order_of_arrival_and_choices_that_of_their_numbers():
    shuffled = [call(1), call(0, id="x-1", choice=1), call(0, id="x")]
    trajectory, _ = assemble(result(*shuffled), 0.0)
    assert [t.call_id for t in trajectory.transitions] == ["x", "x-1", "c1"]


@given(st.permutations(range(4)))
def test_the_order_of_rollouts_does_not_matter_to_turns(order):
    rewards = [1.0, 0.0, 0.5, 0.25]
    group = [states(example(r, [("a", 0.0)] * 2), "s", f"{n % 2}") for n, r in enumerate(rewards)]
    plain = TurnGroups()(group)
    shuffled = TurnGroups()([group[n] for n in order])
    for place_, n in enumerate(order):
        assert shuffled[place_] == pytest.approx(plain[n])


def test_final_rewards_that_hardly_differ_do_not_blow_up_the_intermediate_ones():
    one = example(0.5, [("a", -0.2)])
    other = example(0.500001, [("a", 0.0)])
    low, high = advantages(replace(one, rollout_id="1"), replace(other, rollout_id="2"))
    assert low == pytest.approx(-1.0 - 0.2 / 0.1)
    assert high == pytest.approx(1.0)
