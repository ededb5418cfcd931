"""Whitening over tokens, and the punishment of rollouts that are too long."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fulmen.credit.advantage import credit
from fulmen.credit.assign import example, reward_to_go
from fulmen.credit.baselines import group_mean, no_baseline
from fulmen.credit.overlong import Overlong
from fulmen.credit.whitening import as_it_is, over_batch, over_kinds, whiten
from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Credited, Trajectory


def with_tokens(trajectory: Trajectory, *counts: int) -> Trajectory:
    """The trajectory with so many sampled tokens in its calls."""
    pairs = zip(trajectory.transitions, counts, strict=True)
    changed = [
        replace(t, completion_ids=(2,) * n, logprobs=(-0.1,) * n, trained=t.trained)
        for t, n in pairs
    ]
    return replace(trajectory, transitions=tuple(changed))


def rollout(reward: float, *counts: int, **changes) -> Trajectory:
    plain = example(reward, [("a", 0.0)] * len(counts))
    return replace(with_tokens(plain, *counts), **changes)


def values(credited: list[Credited]) -> list[float]:
    return [item.advantage for item in credited]


def token_by_token(credited: list[Credited]) -> list[float]:
    """Every token's advantage in a list, so that plain means are over tokens."""
    return [
        value
        for item in credited
        for value in (
            item.token_advantages or [item.advantage] * len(item.transition.completion_ids)
        )
    ]


advantages = st.lists(
    st.tuples(st.floats(-10, 10, width=32), st.integers(0, 9)), min_size=1, max_size=12
)


@given(advantages)
def test_whitened_tokens_have_mean_zero_and_deviation_one(pairs):
    numbers, weights = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    white = whiten(numbers, weights)
    each = [v for v, n in zip(white, weights, strict=True) for _ in range(int(n))]
    if not each or max(numbers[weights > 0]) - min(numbers[weights > 0]) < 1e-8:
        assert white.tolist() == [0.0] * len(pairs)
        return
    mean = sum(each) / len(each)
    assert mean == pytest.approx(0.0, abs=1e-6)
    assert sum((v - mean) ** 2 for v in each) / len(each) == pytest.approx(1.0, rel=1e-6)


def test_a_batch_is_whitened_by_tokens_by_hand():
    """Three tokens at 1 and one at 0: mean 3/4, deviation √3/4."""
    credited = credit(
        [rollout(1.0, 1, 2), rollout(0.0, 1)], baseline=no_baseline, whitening=over_batch
    )
    assert values(credited) == pytest.approx([3**-0.5, 3**-0.5, -(3**0.5)])


def test_without_whitening_nothing_changes():
    group = [rollout(1.0, 2), rollout(0.0, 1)]
    assert credit(group, whitening=as_it_is) == credit(group)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(2, 9)), min_size=2),
    st.data(),
)
def test_how_a_rollout_is_cut_into_calls_changes_no_tokens_advantage(drawn, data):
    cuts = [data.draw(st.integers(0, tokens)) for _, tokens in drawn]
    whole = [rollout(reward, tokens) for reward, tokens in drawn]
    cut = [rollout(reward, c, n - c) for (reward, n), c in zip(drawn, cuts, strict=True)]
    for baseline in (no_baseline, group_mean):
        for rule in (None, reward_to_go):
            options = {"baseline": baseline, "whitening": over_batch}
            options |= {"rule": rule} if rule else {}
            one, other = (token_by_token(credit(ts, **options)) for ts in (whole, cut))
            assert other == pytest.approx(one, abs=1e-9)


def test_calls_that_are_not_trained_have_no_part_in_the_statistics():
    both = rollout(1.0, 1, 50)
    silent = replace(both.transitions[1], trained=False)
    both = replace(both, transitions=(both.transitions[0], silent))
    credited = credit([both, rollout(0.0, 1)], baseline=no_baseline, whitening=over_batch)
    assert values(credited) == pytest.approx([1.0, -1.0])


def test_calls_without_tokens_have_no_part_in_the_statistics():
    group = [rollout(1.0, 1), rollout(0.0, 1), rollout(9.0, 0)]
    credited = credit(group, baseline=no_baseline, whitening=over_batch)
    assert values(credited)[:2] == pytest.approx([1.0, -1.0])
    assert math.isfinite(values(credited)[2])


def test_equal_advantages_are_whitened_to_nothing():
    group = [rollout(0.7, 3), rollout(0.7, 5)]
    assert values(credit(group, baseline=no_baseline, whitening=over_batch)) == [0.0, 0.0]
    assert credit([], whitening=over_batch) == []
    assert values(credit([rollout(1.0, 0)], baseline=no_baseline, whitening=over_batch)) == [0.0]


def test_kinds_of_tasks_are_whitened_apart():
    """A hundred times larger rewards of one kind do not drown the other."""
    small = [rollout(1.0, 1, kind="sql"), rollout(0.0, 1, kind="sql")]
    large = [rollout(300.0, 1, kind="web"), rollout(100.0, 3, kind="web")]
    credited = credit([*small, *large], baseline=no_baseline, whitening=over_kinds)
    assert values(credited) == pytest.approx([1.0, -1.0, 3**0.5, -(3**-0.5)])
    assert [item.kind for item in credited] == ["sql", "sql", "web", "web"]
    together = credit([*small, *large], baseline=no_baseline, whitening=over_batch)
    assert abs(values(together)[0] - values(together)[1]) < 0.02


@given(advantages, st.floats(0.1, 100), st.floats(-100, 100))
def test_whitening_forgets_scale_and_shift(pairs, scale, shift):
    numbers, weights = (np.array(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    numbers = numbers.round(2)
    np.testing.assert_allclose(
        whiten(scale * numbers + shift, weights), whiten(numbers, weights), atol=1e-5
    )


def test_token_advantages_are_whitened_one_by_one_and_their_mean_with_them():
    credited = credit(
        [rollout(1.0, 2), rollout(0.0, 2)],
        baseline=no_baseline,
        penalties=[[0.0, 1.0], [0.0, 0.0]],
        whitening=over_batch,
    )
    assert [item.token_advantages for item in credited] == [(0.0, 0.0), (0.0, 0.0)]
    credited = credit(
        [rollout(1.0, 2), rollout(0.0, 2)],
        baseline=no_baseline,
        penalties=[[1.0, 0.0], [0.0, 0.0]],
        whitening=over_batch,
    )
    want = [(-(3**-0.5), 3**0.5), (-(3**-0.5), -(3**-0.5))]
    for item, tokens in zip(credited, want, strict=True):
        assert item.token_advantages == pytest.approx(tokens)
        assert item.advantage == pytest.approx(sum(tokens) / 2)


@pytest.mark.parametrize(
    ("tokens", "punishment"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (99999, -1.0)],
)
def test_the_soft_punishment_of_dapo_at_its_own_numbers(tokens, punishment):
    assert Overlong(limit=20480, buffer=4096).of_length(tokens) == pytest.approx(punishment)
    assert Overlong(20480, 4096, weight=0.5).of_length(tokens) == pytest.approx(punishment / 2)


def test_the_length_of_a_rollout_is_what_was_sampled_in_its_trained_calls():
    long = rollout(1.0, 4, 5, 90)
    silent = replace(long.transitions[2], trained=False)
    long = replace(long, transitions=(*long.transitions[:2], silent))
    assert Overlong(limit=10, buffer=4)(long) == pytest.approx(-0.75)
    assert Overlong(limit=10, buffer=4)(rollout(1.0)) == 0.0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_how_a_rollout_is_cut_into_calls_does_not_change_its_punishment(counts):
    punish = Overlong(limit=40, buffer=25)
    assert punish(rollout(1.0, *counts)) == punish(rollout(1.0, sum(counts)))


def test_without_a_buffer_the_limit_is_a_cliff():
    assert [Overlong(10, 0).of_length(n) for n in (10, 11)] == [0.0, -1.0]


@pytest.mark.parametrize("buffer", [-1, 11])
def test_a_buffer_that_is_longer_than_the_limit_is_refused(buffer):
    with pytest.raises(ConfigError, match="overlong_buffer is"):
        Overlong(limit=10, buffer=buffer)
