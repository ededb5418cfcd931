"""Normalisers: weights by hand, sums of 1, and indifference to order and to cuts."""

from collections import defaultdict
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.learner.normalisers import constant, example, group, rollout, token, transition
from fulmen.schema.errors import ConfigError, DataError

MEANS = {"token": token, "transition": transition, "rollout": rollout, "group": group}
ALL = MEANS | {"constant": partial(constant, tokens=10)}
every_normaliser = pytest.mark.parametrize("normaliser", ALL.values(), ids=list(ALL))
every_mean = pytest.mark.parametrize("name", MEANS)

# Two groups; rollout a has calls of 2 and 4 tokens, b one of 2; c, alone in h, of 8 and of none.
CALLS = [("a", "g", 2), ("a", "g", 4), ("b", "g", 2), ("c", "h", 8), ("c", "h", 0)]


@pytest.mark.parametrize(
    ("normaliser", "weights"),
    [
        (token, [1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 16]),
        (transition, [1 / 8, 1 / 16, 1 / 8, 1 / 32, 0]),
        (rollout, [1 / 18, 1 / 18, 1 / 6, 1 / 24, 1 / 24]),
        (group, [1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 16]),
        (partial(constant, tokens=10), [1 / 30] * 5),
    ],
)
def test_each_normaliser_has_the_weights_computed_by_hand(normaliser, weights):
    assert normaliser(example(*CALLS)) == pytest.approx(weights)


def test_groups_of_different_size_weigh_alike_under_group_only():
    uneven = example(("a", "g", 6), ("b", "g", 2), ("c", "h", 2))
    assert group(uneven) == pytest.approx([1 / 16, 1 / 16, 1 / 4])
    assert token(uneven) == pytest.approx([1 / 10] * 3)


calls = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 50)).map(
        lambda call: (call[0], "g" if call[0] in "ab" else "h", call[1])
    ),
    max_size=12,
)


def reference(name, drawn):
    """The mean of means, by building every mean and asking how far each token moves it."""
    tokens = defaultdict(list)
    for place, (rollout_id, group_id, count) in enumerate(drawn):
        key = {"token": 0, "transition": place, "rollout": rollout_id, "group": group_id}[name]
        tokens[key] += [place] * count
    means = {key: places for key, places in tokens.items() if places}
    weights = [0.0] * len(drawn)
    for places in means.values():
        for place in set(places):
            weights[place] = 1 / len(places) / len(means)
    return weights


@every_mean
@given(drawn=calls)
def test_weighted_sums_are_means_of_means(name, drawn):
    weights = MEANS[name](example(*drawn))
    for weight, want, (_, _, count) in zip(weights, reference(name, drawn), drawn, strict=True):
        assert count == 0 or weight == pytest.approx(want)
    if any(count for _, _, count in drawn):
        total = sum(weight * count for weight, (_, _, count) in zip(weights, drawn, strict=True))
        assert total == pytest.approx(1)


@every_normaliser
@given(drawn=calls, data=st.data())
def test_the_order_of_calls_does_not_matter(normaliser, drawn, data):
    places = data.draw(st.permutations(range(len(drawn))))
    weights = normaliser(example(*drawn))
    shuffled = normaliser(example(*(drawn[place] for place in places)))
    assert shuffled == [weights[place] for place in places]


@pytest.mark.parametrize("name", ["token", "rollout", "group", "constant"])
@given(drawn=calls.filter(bool), data=st.data())
def test_how_a_rollout_is_cut_into_calls_does_not_matter(name, drawn, data):
    place = data.draw(st.integers(0, len(drawn) - 1))
    rollout_id, group_id, count = drawn[place]
    first = data.draw(st.integers(0, count))
    cut = [(rollout_id, group_id, first), (rollout_id, group_id, count - first)]
    whole = ALL[name](example(*drawn))
    parts = ALL[name](example(*drawn[:place], *cut, *drawn[place + 1 :]))
    assert parts == [*whole[:place], whole[place], whole[place], *whole[place + 1 :]]


def test_a_rollout_of_many_calls_weighs_more_under_transition():
    drawn = example(("a", "g", 4), ("a", "g", 4), ("b", "g", 4))
    assert transition(drawn) == pytest.approx([1 / 12] * 3)
    assert rollout(drawn) == pytest.approx([1 / 16, 1 / 16, 1 / 8])


@every_normaliser
def test_a_step_without_any_token_has_weights_and_divides_by_nothing(normaliser):
    weights = normaliser(example(("a", "g", 0), ("b", "g", 0)))
    assert len(weights) == 2
    assert all(0 <= weight < 1 for weight in weights)
    assert normaliser([]) == []


def test_a_constant_does_not_change_with_the_lengths_it_meets():
    short = constant(example(("a", "g", 1), ("b", "g", 1)), tokens=100)
    long = constant(example(("a", "g", 90), ("b", "g", 5)), tokens=100)
    assert short == long == [1 / 200, 1 / 200]


def test_calls_without_a_group_are_not_averaged_over_groups():
    with pytest.raises(DataError, match="1 of 2 calls"):
        group(example(("a", "g", 1), ("b", "", 1)))


@pytest.mark.parametrize("tokens", [0, -1, float("nan")])
def test_a_constant_of_nothing_is_refused(tokens):
    with pytest.raises(ConfigError, match="above 0"):
        constant(example(("a", "g", 1)), tokens=tokens)
