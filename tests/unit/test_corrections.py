"""Off-policy corrections against plain loops and numbers computed by hand."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen.learner.corrections import (
    effective_share,
    mask,
    mask_call,
    mask_call_k3,
    product,
    truncate,
    truncate_call,
    uncorrected,
    veto,
)
from fulmen.learner.terms import Terms, example

CORRECTIONS = {
    "uncorrected": uncorrected,
    "truncate": partial(truncate, high=2.0),
    "truncate_call": partial(truncate_call, high=5.0),
    "mask": partial(mask, low=0.5, high=5.0),
    "mask_call": partial(mask_call, low=0.7, high=1.4),
    "mask_call_k3": partial(mask_call_k3, limit=0.5),
    "veto": partial(veto, low=1e-2),
}
every_correction = pytest.mark.parametrize(
    "correction", CORRECTIONS.values(), ids=list(CORRECTIONS)
)


def terms(calls, *, dtype=torch.float64) -> Terms:
    """Terms whose (log π_old, log μ) are given call by call."""
    tokens = [(number, *token) for number, call in enumerate(calls) for token in call]
    numbers, old, behaviour = zip(*tokens, strict=True)
    return Terms(
        torch.tensor(old, dtype=dtype).requires_grad_(),
        torch.tensor(old, dtype=dtype),
        torch.tensor(behaviour, dtype=dtype),
        torch.ones(len(tokens), dtype=dtype),
        torch.tensor(numbers),
    )


def bounded_exp(value):
    return math.exp(min(max(value, -20.0), 20.0))


def reference(name, calls):
    """Weights token by token, in plain Python."""
    weights = []
    for call in calls:
        logs = [old - behaviour for old, behaviour in call]
        ratios = [bounded_exp(value) for value in logs]
        mean = sum(logs) / len(logs)
        k3 = sum(r - v - 1 for r, v in zip(ratios, logs, strict=True)) / len(logs)
        weights += {
            "uncorrected": [1.0] * len(call),
            "truncate": [min(ratio, 2.0) for ratio in ratios],
            "truncate_call": [min(bounded_exp(sum(logs)), 5.0)] * len(call),
            "mask": [ratio if 0.5 <= ratio <= 5.0 else 0.0 for ratio in ratios],
            "mask_call": [float(0.7 <= bounded_exp(mean) <= 1.4)] * len(call),
            "mask_call_k3": [float(k3 <= 0.5)] * len(call),
            "veto": [float(all(ratio >= 1e-2 for ratio in ratios))] * len(call),
        }[name]
    return weights


def batches(log_probs, *, longest=4):
    token = st.tuples(log_probs, log_probs)
    return st.lists(st.lists(token, min_size=1, max_size=longest), min_size=1, max_size=4)


@pytest.mark.parametrize("name", CORRECTIONS)
@given(calls=batches(st.floats(-6, 0)))
def test_every_correction_matches_its_definition(name, calls):
    got = CORRECTIONS[name](terms(calls))
    np.testing.assert_allclose(got.tolist(), reference(name, calls), rtol=1e-9)
    assert not got.requires_grad


# ρ of two calls, 2 · 0.25 · 1 and 1.25 · 0.8; then a call of one hopeless token.
BY_HAND = example(
    old=[0.5, 0.125, 0.5, 0.5, 0.4, 0.0005],
    behaviour=[0.25, 0.5, 0.5, 0.4, 0.5, 0.5],
    calls=[0, 0, 0, 1, 1, 2],
)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (partial(truncate, high=1.5), [1.5, 0.25, 1, 1.25, 0.8, 0.001]),
        (partial(truncate_call, high=0.75), [0.5, 0.5, 0.5, 0.75, 0.75, 0.001]),
        (partial(mask, low=0.5, high=1.5), [0, 0, 1, 1.25, 0.8, 0]),
        # Geometric means: 0.5^(1/3) = 0.7937, 1, 0.001.
        (partial(mask_call, low=0.8, high=1.2), [0, 0, 0, 1, 1, 0]),
        (partial(mask_call, low=0.79, high=1.2), [1, 1, 1, 1, 1, 0]),
        # Means of ρ − log ρ − 1: (0.306853 + 0.636294 + 0) / 3 = 0.314382, 0.025, 5.908755.
        (partial(mask_call_k3, limit=0.31), [0, 0, 0, 1, 1, 0]),
        (partial(mask_call_k3, limit=0.32), [1, 1, 1, 1, 1, 0]),
        (partial(mask_call_k3, limit=0.024), [0, 0, 0, 0, 0, 0]),
        (partial(mask_call_k3, limit=5.91), [1, 1, 1, 1, 1, 1]),
        (partial(veto, low=0.002), [1, 1, 1, 1, 1, 0]),
        (partial(veto, low=0.3), [0, 0, 0, 1, 1, 0]),
    ],
)
def test_each_correction_has_the_weights_computed_by_hand(correction, weights):
    want = torch.tensor(weights, dtype=torch.float32)
    torch.testing.assert_close(correction(BY_HAND), want, rtol=1e-5, atol=1e-6)
    assert correction(BY_HAND).dtype == torch.float32


@given(batches(st.floats(-6, 0), longest=1))
def test_token_and_call_level_agree_for_calls_of_one_token(calls):
    given_terms = terms(calls)
    torch.testing.assert_close(
        truncate(given_terms, high=3.0), truncate_call(given_terms, high=3.0)
    )
    tokens, whole = (f(given_terms, low=0.5, high=2.0) for f in (mask, mask_call))
    assert torch.equal(tokens > 0, whole > 0)


def test_differences_in_both_directions_cancel_in_the_mean_and_add_up_in_k3():
    wild = example(behaviour=[0.1, 10.0])
    assert mask_call(wild, low=0.99, high=1.01).tolist() == [1, 1]
    assert mask_call_k3(wild, limit=0.01).tolist() == [0, 0]


def test_the_length_of_a_call_decides_its_product_and_not_its_geometric_mean():
    steady = [(0.0, -0.01)]
    long = terms([steady * 1000], dtype=torch.float32)
    assert truncate_call(long, high=1e9)[0].item() == pytest.approx(math.exp(10), rel=1e-4)
    assert mask_call(long, low=0.98, high=1.02).all()


@every_correction
def test_the_policy_that_sampled_needs_no_correction(correction):
    on_policy = example(old=[0.5, 0.1, 0.9], behaviour=[0.5, 0.1, 0.9], calls=[0, 0, 1])
    assert correction(on_policy).tolist() == [1, 1, 1]


@every_correction
@given(calls=batches(st.one_of(st.floats(-1e4, 1e4), st.sampled_from([-1e4, 1e4]))))
def test_weights_are_finite_and_not_negative_however_stale_a_token_is(correction, calls):
    weights = correction(terms(calls, dtype=torch.float32))
    assert weights.isfinite().all()
    assert (weights >= 0).all()


@every_correction
def test_a_call_without_log_probabilities_leaves_the_weights_of_others_alone(correction):
    calls = [[(-1.0, -1.2), (-0.5, -0.4)], [(-1.0, float("nan"))], [(-2.0, -2.1)]]
    got = correction(terms(calls))
    alone = correction(terms([calls[0], calls[2]]))
    torch.testing.assert_close(got[[0, 1, 3]], alone)


def test_a_product_multiplies_and_one_of_nothing_is_no_correction():
    cautious = product(partial(truncate, high=1.5), partial(veto, low=0.002))
    torch.testing.assert_close(
        cautious(BY_HAND), torch.tensor([1.5, 0.25, 1, 1.25, 0.8, 0.0]), rtol=1e-5, atol=1e-6
    )
    assert product()(BY_HAND).tolist() == [1] * 6


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0),
        ([3.0, 3.0], 1.0),
        ([0.0, 0.0, 7.0, 0.0], 0.25),
        ([1.0, 3.0], 0.8),  # 16 / (2 · 10)
        ([0.0, 0.0], 0.0),
        ([], 0.0),
        ([math.exp(20)] * 3, 1.0),
    ],
)
def test_the_effective_share_by_hand(weights, share):
    assert effective_share(torch.tensor(weights)) == pytest.approx(share)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_the_effective_share_is_a_share_and_knows_no_scale(weights):
    values = torch.tensor(weights, dtype=torch.float64)
    share = effective_share(values)
    assert 0 <= share <= 1 + 1e-12
    if min(weights) > 1e-3:
        assert share >= 1 / len(weights)
        assert effective_share(values * 16) == pytest.approx(share)
