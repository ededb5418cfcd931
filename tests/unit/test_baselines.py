"""Baselines against their definitions in plain Python and against numbers computed by hand."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fulmen.credit.advantage import credit, share_with_signal
from fulmen.credit.assign import example, last
from fulmen.credit.baselines import (
    Centred,
    batch_mean,
    group_mean,
    grpo,
    maxrl,
    no_baseline,
    rloo,
)
from fulmen.schema.errors import DataError

OF_GROUPS = [grpo, group_mean, rloo, maxrl]
ALL = [*OF_GROUPS, batch_mean, no_baseline]


def slow_grpo(value, own, _):
    mean = sum(own) / len(own)
    return (value - mean) / math.sqrt(sum((r - mean) ** 2 for r in own) / len(own))


def slow_group_mean(value, own, _):
    return value - sum(own) / len(own)


def slow_rloo(value, own, _):
    others = list(own)
    others.remove(value)
    return value - sum(others) / len(others)


def slow_maxrl(value, own, _):
    return value * len(own) / sum(own) - 1


def slow_batch_mean(value, _, every):
    return value - sum(every) / len(every)


SLOW = {
    grpo: slow_grpo,
    group_mean: slow_group_mean,
    rloo: slow_rloo,
    maxrl: slow_maxrl,
    batch_mean: slow_batch_mean,
}


def slow_reference(baseline, rewards, groups):
    """The definitions in plain Python, written without looking at the array code."""
    answer = []
    for value, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        compared = rewards if baseline is batch_mean else own
        equal = max(compared) - min(compared) < 1e-8
        answer.append(0.0 if equal else SLOW[baseline](value, own, rewards))
    return answer


def of(baseline, rewards, groups) -> Centred:
    return baseline(np.array(rewards, dtype=np.float64), list(groups))


drawn_rewards = st.lists(
    st.tuples(st.floats(0, 10, width=32), st.sampled_from("abc")), min_size=1, max_size=24
)


@pytest.mark.parametrize("baseline", SLOW)
@given(drawn_rewards)
def test_every_baseline_matches_its_definition(baseline, pairs):
    rewards, groups = zip(*pairs, strict=True)
    got = of(baseline, rewards, groups).values
    want = slow_reference(baseline, rewards, groups)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("baseline", "values", "units"),
    [
        (grpo, [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], [3**0.5 / 4] * 4),
        (group_mean, [0.75, -0.25, -0.25, -0.25], [1.0] * 4),
        (rloo, [1.0, -1 / 3, -1 / 3, -1 / 3], [1.0] * 4),
        (maxrl, [3.0, -1.0, -1.0, -1.0], [0.25] * 4),
        (batch_mean, [0.75, -0.25, -0.25, -0.25], [1.0] * 4),
        (no_baseline, [1.0, 0.0, 0.0, 0.0], [1.0] * 4),
    ],
)
def test_one_success_in_four_by_hand(baseline, values, units):
    got = of(baseline, [1.0, 0.0, 0.0, 0.0], "gggg")
    assert got.values == pytest.approx(values)
    assert got.units == pytest.approx(units)


@pytest.mark.parametrize("baseline", OF_GROUPS)
@given(drawn_rewards)
def test_the_advantages_of_a_group_sum_to_zero(baseline, pairs):
    rewards, groups = zip(*pairs, strict=True)
    got = of(baseline, rewards, groups).values
    for name in set(groups):
        assert abs(sum(a for a, g in zip(got, groups, strict=True) if g == name)) < 1e-5


@given(drawn_rewards)
def test_rloo_is_the_centred_reward_times_g_over_g_minus_one(pairs):
    rewards, groups = zip(*pairs, strict=True)
    sizes = np.array([groups.count(g) for g in groups])
    wanted = np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1), 0.0)
    wanted = wanted * of(group_mean, rewards, groups).values
    np.testing.assert_allclose(of(rloo, rewards, groups).values, wanted, atol=1e-9)


@given(drawn_rewards)
def test_the_advantages_of_a_batch_sum_to_zero_under_its_mean(pairs):
    rewards, groups = zip(*pairs, strict=True)
    assert abs(of(batch_mean, rewards, groups).values.sum()) < 1e-6


@pytest.mark.parametrize("baseline", ALL)
@given(st.permutations(range(6)))
def test_the_order_of_rollouts_does_not_matter(baseline, order):
    rewards, groups = [1.0, 0.0, 0.5, 0.25, 1.0, 0.75], "aabbba"
    plain = of(baseline, rewards, groups)
    mixed = of(baseline, [rewards[n] for n in order], [groups[n] for n in order])
    assert mixed.values == pytest.approx([plain.values[n] for n in order])
    assert mixed.units == pytest.approx([plain.units[n] for n in order])


@pytest.mark.parametrize("baseline", [grpo, group_mean, maxrl])
def test_duplicating_a_group_changes_nothing(baseline):
    once, twice = of(baseline, [0.0, 1.0, 1.0], "ggg"), of(baseline, [0.0, 1.0, 1.0] * 2, "g" * 6)
    assert twice.values[:3] == pytest.approx(once.values)


@pytest.mark.parametrize("baseline", OF_GROUPS)
@pytest.mark.parametrize(("value", "size"), list(product([0.0, 0.1, 0.7, 1e6], [1, 3, 16])))
def test_equal_rewards_carry_no_signal_whatever_their_rounding(baseline, value, size):
    got = of(baseline, [value] * size, ["g"] * size)
    assert got.values.tolist() == [0.0] * size
    assert got.units.tolist() == [1.0] * size


@pytest.mark.parametrize(("baseline", "values"), [(batch_mean, [0.5, -0.5]), (no_baseline, [1, 0])])
def test_groups_of_one_carry_signal_where_nothing_is_compared_within_groups(baseline, values):
    assert of(baseline, [1.0, 0.0], "ab").values.tolist() == values


def test_a_user_array_is_not_changed_by_having_no_baseline():
    rewards = np.array([1.0, 0.5])
    no_baseline(rewards, ["a", "b"]).values[0] = 7.0
    assert rewards.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("baseline", [grpo, maxrl])
def test_units_are_bounded_where_rewards_hardly_differ_or_are_rare(baseline):
    units = of(baseline, [1e-4, 0.0, 0.0], "ggg").units
    assert units.tolist() == [0.1] * 3


def test_maxrl_refuses_rewards_below_zero():
    with pytest.raises(DataError, match=r"rewards of at least 0, and one is -0\.5"):
        of(maxrl, [1.0, -0.5], "gg")


def group(*rewards: float, names: str | None = None):
    return [
        replace(
            example(reward, [("a", 0.2), ("a", 0.0)]),
            rollout_id=f"r{place}",
            group=names[place] if names else "g",
        )
        for place, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("baseline", "wanted"),
    [
        (grpo, [0.4, 1.0, 0.4, -1.0]),
        (group_mean, [0.2, 0.5, 0.2, -0.5]),
        (rloo, [0.2, 1.0, 0.2, -1.0]),
        (maxrl, [0.4, 1.0, 0.4, -1.0]),
        (batch_mean, [0.2, 0.5, 0.2, -0.5]),
        (no_baseline, [0.2, 1.0, 0.2, 0.0]),
    ],
)
def test_other_rewards_are_put_on_the_scale_of_the_final_ones(baseline, wanted):
    credited = credit(group(1.0, 0.0), rule=last, baseline=baseline)
    assert [item.advantage for item in credited] == pytest.approx(wanted)


def test_credited_calls_know_their_group():
    assert [item.group for item in credit(group(1.0, 0.0, names="ab"))] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("baseline", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_with_its_rollout(baseline, bad):
    with pytest.raises(DataError, match=f"a reward of rollout r1 is {bad}"):
        credit(group(0.0, bad), baseline=baseline)


def test_an_intermediate_reward_that_is_no_number_is_refused_with_its_rollout():
    one, two = group(0.0, 1.0)
    broken = replace(two.transitions[0], reward=math.nan)
    for two_broken in (
        replace(two, intermediate=math.nan),
        replace(two, transitions=(broken, two.transitions[1])),
    ):
        with pytest.raises(DataError, match="a reward of rollout r1 is nan"):
            credit([one, two_broken])


@pytest.mark.parametrize(
    ("centred", "message"),
    [
        (Centred(np.zeros(3), np.ones(2)), "values of .* are not 2 finite"),
        (
            Centred(np.array([0.0, math.nan]), np.ones(2)),
            "values of .* are not 2 finite",
        ),
        (Centred(np.zeros(2), np.ones(1)), "units of .* are not 2 finite"),
        (Centred(np.zeros(2), np.array([1.0, 0.0])), "gave a unit of 0; units are above 0"),
    ],
)
def test_a_baseline_of_ones_own_is_checked(centred, message):
    with pytest.raises(DataError, match=message):
        credit(group(0.0, 1.0), baseline=lambda *_: centred)


def test_a_group_has_signal_where_its_baseline_leaves_something():
    plain = [replace(example(1.0, [("a", 0.0)]), group=name) for name in "aabb"]
    shares = [share_with_signal({"a", "b"}, credit(plain, baseline=one)) for one in ALL]
    assert shares == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    uneven = [replace(plain[0], reward=0.0), *plain[1:]]
    assert share_with_signal({"a", "b"}, credit(uneven, baseline=batch_mean)) == 1.0
