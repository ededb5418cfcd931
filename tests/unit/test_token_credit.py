"""Returns of tokens and PPO's advantages, against slow references and numbers computed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fulmen.credit.advantage import credit
from fulmen.credit.assign import identical, last, reward_to_go
from fulmen.credit.baselines import grpo, no_baseline
from fulmen.credit.critic import GAE, credit_with_critic, gae
from fulmen.credit.tokens import by_trajectory, discounted_tokens, returns_to_go, token_rewards
from fulmen.credit.turns import TurnGroups
from fulmen.credit.whitening import over_batch
from fulmen.schema.errors import ConfigError, DataError
from fulmen.schema.records import Trajectory, Transition


def rollout(reward: float, *calls: tuple[int, float] | tuple[int, float, bool], **changes):
    """A trajectory of calls as (sampled tokens, own reward) and False for one not trained."""
    transitions = [
        Transition(
            rollout_id="r",
            call_id=f"c{place}",
            agent="a",
            prompt_ids=(1,),
            completion_ids=(2,) * tokens,
            logprobs=(-0.1,) * tokens,
            temperature=1.0,
            version=0,
            reward=own,
            trained=not rest or rest[0],
        )
        for place, (tokens, own, *rest) in enumerate(calls)
    ]
    plain = Trajectory(rollout_id="r", group="g", transitions=tuple(transitions), reward=reward)
    return replace(plain, **changes)


def slow_gae(rewards, values, gamma, lam):
    """The sum of the definition, without recursion."""
    ahead = [*values, 0.0][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, ahead, values, strict=True)]
    return [
        sum((gamma * lam) ** step * delta for step, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def masked_gae(rewards, values, mask, gamma, lam):
    """GAE as trainers of one long row do it: where the mask is 0, what is known of the later tokens
    is carried to the earlier ones unchanged."""
    found, next_value, later = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            later = rewards[t] + gamma * next_value - values[t] + gamma * lam * later
            next_value = values[t]
            found[t] = later
    return found


numbers = st.floats(-3, 3, width=32)
discounts = st.sampled_from([0.5, 0.9, 1.0])
lambdas = st.sampled_from([0.0, 0.5, 0.95, 1.0])
calls = st.lists(st.tuples(st.integers(0, 4), numbers, st.booleans()), max_size=6)


@st.composite
def judged(draw) -> tuple[Trajectory, list[list[float]], list[list[float]]]:
    """A trajectory with values and penalties of its trained calls."""
    trajectory = rollout(draw(numbers), *draw(calls), intermediate=draw(numbers))
    sizes = [len(t.completion_ids) for t in trajectory.transitions if t.trained]
    values, penalties = (
        [draw(st.lists(numbers, min_size=n, max_size=n)) for n in sizes] for _ in range(2)
    )
    return trajectory, values, penalties


def flat(lists) -> list[float]:
    return [value for own in lists for value in own]


def of_tokens(credited) -> list[float]:
    return flat(item.token_advantages for item in credited)


def test_gae_over_three_steps_by_hand():
    """δ = (0 + .5·.5 − .25, .25 + .5·1 − .5, 1 − 1) = (0, .25, 0) and γλ = .25."""
    found = gae([0.0, 0.25, 1.0], [0.25, 0.5, 1.0], gamma=0.5, lam=0.5)
    assert found.advantages == pytest.approx([0.0625, 0.25, 0.0])
    assert found.returns == pytest.approx([0.3125, 0.75, 1.0])


steps = st.lists(st.tuples(numbers, numbers), max_size=12)


@given(steps, discounts, lambdas)
def test_gae_is_the_discounted_sum_of_the_one_step_errors(drawn, gamma, lam):
    rewards, values = [r for r, _ in drawn], [v for _, v in drawn]
    found = gae(rewards, values, gamma=gamma, lam=lam)
    assert found.advantages == pytest.approx(slow_gae(rewards, values, gamma, lam), abs=1e-6)
    assert found.returns == pytest.approx(np.add(found.advantages, values), abs=1e-6)


@given(steps)
def test_gae_with_lambda_one_and_no_discount_is_the_return_minus_the_value(drawn):
    rewards, values = [r for r, _ in drawn], [v for _, v in drawn]
    found = gae(rewards, values, gamma=1.0, lam=1.0)
    to_go = [sum(rewards[t:]) for t in range(len(rewards))]
    assert found.returns == pytest.approx(to_go, abs=1e-6)
    assert found.advantages == pytest.approx(np.subtract(to_go, values), abs=1e-6)


@given(steps, discounts)
def test_gae_with_lambda_zero_is_the_one_step_error(drawn, gamma):
    rewards, values = [r for r, _ in drawn], [v for _, v in drawn]
    ahead = [*values, 0.0][1:]
    wanted = [r + gamma * n - v for r, v, n in zip(rewards, values, ahead, strict=True)]
    assert gae(rewards, values, gamma=gamma, lam=0.0).advantages == pytest.approx(wanted, abs=1e-6)


def test_rewards_come_with_the_last_token_of_their_call():
    trajectory = rollout(1.0, (2, 0.25), (1, 0.0), (3, 0.5), intermediate=0.125)
    assert token_rewards(trajectory) == [[0.0, 0.25], [0.0], [0.0, 0.0, 1.625]]


def test_what_a_call_without_trained_tokens_earned_comes_with_the_token_before_it():
    trajectory = rollout(1.0, (1, 0.0), (5, 0.25, False), (0, 0.5), (1, 0.0), (2, 0.125, False))
    assert token_rewards(trajectory) == [[0.75], [], [], [1.125], []]


def test_what_was_earned_before_the_first_trained_token_goes_nowhere():
    assert token_rewards(rollout(1.0, (3, 9.0, False), (1, 0.0))) == [[], [1.0]]
    assert token_rewards(rollout(1.0, (3, 9.0, False))) == [[]]
    assert token_rewards(rollout(1.0)) == []


@given(judged())
def test_no_reward_after_the_first_trained_token_is_lost(drawn):
    trajectory, _, _ = drawn
    places = [n for n, t in enumerate(trajectory.transitions) if t.trained and t.completion_ids]
    if places:
        counted = sum(t.reward for t in trajectory.transitions[places[0] :])
        total = trajectory.reward + trajectory.intermediate + counted
        assert sum(flat(token_rewards(trajectory))) == pytest.approx(total, abs=1e-5)


@given(judged(), discounts)
def test_token_returns_are_discounted_sums_over_the_calls_in_a_row(drawn, gamma):
    trajectory, _, penalties = drawn
    own = by_trajectory([trajectory], penalties, "penalties")[0]
    rewards = flat(token_rewards(trajectory, own))
    wanted = [
        sum(gamma**step * r for step, r in enumerate(rewards[t:])) for t in range(len(rewards))
    ]
    found = discounted_tokens(gamma)(trajectory, own)
    assert flat(found) == pytest.approx(wanted, abs=1e-5)
    assert [len(one) for one in found] == [
        len(t.completion_ids) if t.trained else 0 for t in trajectory.transitions
    ]


@given(judged(), discounts)
def test_token_returns_are_gae_of_a_critic_that_foresees_nothing(drawn, gamma):
    trajectory, values, penalties = drawn
    nothing = [[0.0] * len(own) for own in values]
    credited = credit(
        [trajectory],
        baseline=no_baseline,
        tokens=discounted_tokens(gamma),
        penalties=penalties,
    )
    critic = credit_with_critic(
        [trajectory], nothing, estimator=GAE(gamma, 1.0), penalties=penalties
    )
    assert of_tokens(credited) == pytest.approx(of_tokens(critic), abs=1e-6)


@given(judged(), discounts, lambdas)
def test_tokens_in_between_are_skipped_as_in_one_long_masked_row(drawn, gamma, lam):
    """Two prompt tokens stand before every completion; tokens that are not trained are masked."""
    trajectory, values, penalties = drawn
    own = by_trajectory([trajectory], penalties, "penalties")[0]
    rewards, foreseen, mask = [], [], []
    given_values = iter(values)
    for transition, reward in zip(
        trajectory.transitions, token_rewards(trajectory, own), strict=True
    ):
        tokens = len(transition.completion_ids)
        mask += [0, 0] + [int(transition.trained)] * tokens
        rewards += [7.0, 7.0] + (reward if transition.trained else [7.0] * tokens)
        foreseen += [7.0, 7.0] + (next(given_values) if transition.trained else [7.0] * tokens)
    wanted = masked_gae(rewards, foreseen, mask, gamma, lam)
    credited = credit_with_critic(
        [trajectory], values, estimator=GAE(gamma, lam), penalties=penalties
    )
    assert of_tokens(credited) == pytest.approx(
        [a for a, m in zip(wanted, mask, strict=True) if m], abs=1e-5
    )


@given(judged(), discounts, lambdas, st.data())
def test_how_tokens_are_cut_into_calls_changes_no_tokens_advantage(drawn, gamma, lam, data):
    """The same tokens, all in one call, with all rewards at its end."""
    values = data.draw(st.lists(numbers, min_size=2, max_size=8))
    cut = data.draw(st.integers(0, len(values)))
    final = data.draw(numbers)
    whole = rollout(final, (len(values), 0.0))
    parts = rollout(final, (cut, 0.0), (len(values) - cut, 0.0))
    one = credit_with_critic([whole], [values], estimator=GAE(gamma, lam))
    two = credit_with_critic([parts], [values[:cut], values[cut:]], estimator=GAE(gamma, lam))
    assert of_tokens(two) == pytest.approx(of_tokens(one))
    assert flat(item.returns for item in two) == pytest.approx(one[0].returns)


def test_token_level_gae_over_two_turns_by_hand():
    """γ = λ = 1: what is to come minus what was foreseen; the call in between is the world's."""
    trajectory = rollout(1.0, (2, 0.0), (4, 0.5, False), (1, 0.0))
    one, two = credit_with_critic([trajectory], [[0.5, 0.25], [0.75]], estimator=GAE(1.0, 1.0))
    assert (one.transition.call_id, two.transition.call_id) == ("c0", "c2")
    assert one.token_advantages == (1.0, 1.25)
    assert one.returns == (1.5, 1.5)
    assert two.token_advantages == (0.25,)
    assert one.advantage == 1.125
    assert one.group == "g"


def test_turn_level_gae_by_hand():
    """V = (.5, .25) at the ends of the prompts; δ = (.25 + .5·.25 − .5, 1 − .25)."""
    trajectory = rollout(1.0, (2, 0.25), (3, 0.0))
    one, two = credit_with_critic(
        [trajectory], [[0.5, 99.0], [0.25, 99.0, 99.0]], estimator=GAE(0.5, 0.5, "turn")
    )
    assert two.token_advantages == (0.75,) * 3
    assert one.token_advantages == (-0.125 + 0.25 * 0.75,) * 2
    assert two.returns == (1.0,) * 3
    assert one.returns == (one.advantage + 0.5,) * 2
    assert one.advantage == one.token_advantages[0]


@given(judged(), discounts, lambdas)
def test_turn_level_gae_is_token_level_gae_of_calls_that_are_one_token_long(drawn, gamma, lam):
    trajectory, values, penalties = drawn
    turns = credit_with_critic(
        [trajectory], values, estimator=GAE(gamma, lam, "turn"), penalties=penalties
    )
    long = [n for n, t in enumerate(trajectory.transitions) if t.trained and t.completion_ids]
    short = rollout(
        trajectory.reward,
        *(
            (1 if n in long else 0, t.reward, t.trained)
            for n, t in enumerate(trajectory.transitions)
        ),
        intermediate=trajectory.intermediate,
    )
    tokens = credit_with_critic(
        [short],
        [own[:1] for own in values],
        estimator=GAE(gamma, lam),
        penalties=[[sum(own)] if own else [] for own in penalties],
    )
    for turn, token in zip(turns, tokens, strict=True):
        assert set(turn.token_advantages) == set(turn.token_advantages[:1])
        assert turn.token_advantages[:1] == pytest.approx(token.token_advantages, abs=1e-5)
        assert turn.returns[:1] == pytest.approx(token.returns, abs=1e-5)


def test_a_zero_length_completion_has_no_token_advantages_and_no_say():
    empty, one = credit_with_critic([rollout(1.0, (0, 0.25), (1, 0.0))], [[], [0.5]])
    assert (empty.advantage, empty.token_advantages, empty.returns) == (0.0, (), ())
    assert one.token_advantages == (0.5,)


def test_whitening_leaves_the_returns_of_the_critic_alone():
    group = [rollout(1.0, (2, 0.0)), rollout(0.0, (1, 0.0))]
    values = [[0.5, 0.25], [0.0]]
    plain = credit_with_critic(group, values)
    white = credit_with_critic(group, values, whitening=over_batch)
    assert [item.returns for item in white] == [item.returns for item in plain]
    assert sum(of_tokens(white)) == pytest.approx(0.0)
    assert np.std(of_tokens(white)) == pytest.approx(1.0)


def test_penalties_are_taken_off_the_reward_of_their_token_and_reach_the_tokens_before():
    """REINFORCE++: A_t = R − Σ_{s≥t} β·kl_s, across the border of the calls."""
    trajectory = rollout(1.0, (2, 0.0), (1, 0.0))
    one, two = credit(
        [trajectory],
        rule=reward_to_go,
        baseline=no_baseline,
        penalties=[[0.5, 0.25], [0.125]],
    )
    assert one.token_advantages == (0.125, 0.625)
    assert two.token_advantages == (0.875,)
    assert (one.advantage, one.returns) == (0.375, ())


@pytest.mark.parametrize("rule", [identical, last, reward_to_go])
@given(judged())
def test_penalties_of_zero_leave_every_token_the_advantage_of_its_call(rule, drawn):
    trajectory, values, _ = drawn
    nothing = [[0.0] * len(own) for own in values]
    plain = credit([trajectory], rule=rule)
    tokens = credit([trajectory], rule=rule, penalties=nothing)
    for call, each in zip(plain, tokens, strict=True):
        count = len(call.transition.completion_ids)
        assert each.token_advantages == pytest.approx((call.advantage,) * count)


@given(judged())
def test_undiscounted_token_returns_are_those_of_reward_to_go(drawn):
    trajectory, _, _ = drawn
    # What a call without trained tokens earned has another place there: it keeps its own.
    own = [replace(t, reward=t.reward if t.trained else 0.0) for t in trajectory.transitions]
    own = [t for t in own if t.completion_ids]
    trajectory = replace(trajectory, transitions=tuple(own))
    calls = credit([trajectory], rule=reward_to_go, baseline=no_baseline)
    tokens = credit([trajectory], tokens=discounted_tokens(1.0), baseline=no_baseline)
    for call, each in zip(calls, tokens, strict=True):
        count = len(call.transition.completion_ids)
        assert each.token_advantages == pytest.approx((call.advantage,) * count, abs=1e-5)


def test_penalties_are_on_the_scale_of_the_group():
    won, lost = rollout(1.0, (1, 0.0)), rollout(0.0, (1, 0.0))
    credited = credit([won, lost], baseline=grpo, penalties=[[0.25], [0.0]])
    assert of_tokens(credited) == [1.0 - 0.25 / 0.5, -1.0]


def test_comparing_turns_adds_to_every_token_of_the_call():
    won, lost = rollout(1.0, (2, 0.0)), rollout(0.0, (1, 0.0))
    credited = credit([won, lost], turns=TurnGroups(), penalties=[[0.0, 0.0], [0.0]])
    assert [item.token_advantages for item in credited] == [(2.0, 2.0), (-2.0,)]


def test_returns_to_go_of_nothing_is_nothing():
    assert returns_to_go([], 0.5) == []
    assert returns_to_go([[], []], 0.5) == [[], []]


@pytest.mark.parametrize(
    ("numbers_given", "message"),
    [
        ([[0.0]], "values of 1 calls for 2 trained ones"),
        ([[0.0], [0.0], [0.0]], "values of 3 calls for 2 trained ones"),
        ([[0.0], [0.0, 0.0]], "values of call c2 are 2 numbers, not 1 finite ones"),
        ([[math.nan], [0.0]], "values of call c0 are 1 numbers, not 1 finite ones"),
    ],
)
def test_values_that_do_not_fit_the_calls_are_refused(numbers_given, message):
    trajectory = rollout(1.0, (1, 0.0), (3, 0.0, False), (1, 0.0))
    with pytest.raises(DataError, match=message):
        credit_with_critic([trajectory], numbers_given)


def test_rewards_that_are_no_numbers_are_refused_with_their_rollout():
    with pytest.raises(DataError, match="a reward of rollout r is nan"):
        credit_with_critic([rollout(math.nan, (1, 0.0))], [[0.0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.0}, "discount is 0.0"),
        ({"gamma": 1.1}, "discount is 1.1"),
        ({"lam": -0.1}, "gae_lambda is -0.1"),
        ({"lam": 1.1}, "gae_lambda is 1.1"),
    ],
)
def test_numbers_outside_their_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GAE(**options)
    with pytest.raises(ConfigError, match=r"token_discount is 1\.5"):
        discounted_tokens(1.5)
