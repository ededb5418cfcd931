"""Policy losses and the critic's against plain loops, finite differences and numbers by hand."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen.learner.exclusion import select, usable, weighted
from fulmen.learner.losses import (
    cispo,
    clipped_surrogate,
    gspo,
    reinforce,
    supervised,
    value_loss,
)
from fulmen.learner.terms import Terms, example
from fulmen.schema.errors import ConfigError

LOW, HIGH, DUAL = 0.2, 0.28, 3.0

LOSSES = {
    "clipped": partial(clipped_surrogate, low=LOW, high=HIGH),
    "dual": partial(clipped_surrogate, low=LOW, high=HIGH, dual=DUAL),
    "gspo": partial(gspo, low=LOW, high=HIGH),
    "cispo": partial(cispo, low=LOW, high=HIGH),
    "reinforce": reinforce,
    "supervised": supervised,
    "by_advantage": partial(supervised, by_advantage=True),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))


def terms(tokens, *, dtype=torch.float64) -> Terms:
    """Terms of (call, log π, log π_old, A), with a gradient for log π."""
    calls, new, old, advantages = zip(*tokens, strict=True)

    def column(values):
        return torch.tensor(values, dtype=dtype)

    return Terms(
        column(new).requires_grad_(), column(old), column(old), column(advantages), number(calls)
    )


def number(calls) -> torch.Tensor:
    return torch.tensor(calls, dtype=torch.int64)


def clip(value, low, high):
    return min(max(value, low), high)


def bounded_ratio(new, old):
    return math.exp(clip(new - old, -20, 20))


def plain_clip(ratio, advantage, dual=None):
    """Loss and derivative with respect to log π, by cases rather than by min and max."""
    if advantage > 0 and ratio > 1 + HIGH:
        return -(1 + HIGH) * advantage, 0.0
    if advantage < 0 and ratio < 1 - LOW:
        return -(1 - LOW) * advantage, 0.0
    if advantage < 0 and dual is not None and ratio > dual:
        return -dual * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def reference(name, tokens):
    """(loss, gradient, ratio) of each token, in plain Python."""
    result = []
    for call, new, old, advantage in tokens:
        ratio = bounded_ratio(new, old)
        if name == "gspo":
            logs = [n - o for c, n, o, _ in tokens if c == call]
            ratio = bounded_ratio(sum(logs) / len(logs), 0.0)
        if name in ("clipped", "dual", "gspo"):
            result.append((*plain_clip(ratio, advantage, DUAL if name == "dual" else None), ratio))
            continue
        chosen = 1.0 if advantage > 0 else 0.0
        factor = {
            "cispo": clip(ratio, 1 - LOW, 1 + HIGH) * advantage,
            "reinforce": advantage,
            "supervised": chosen,
            "by_advantage": chosen * advantage,
        }[name]
        result.append((-factor * new, -factor, ratio))
    return [list(column) for column in zip(*result, strict=True)]


def gradient(policy, given_terms, weights=None) -> torch.Tensor:
    loss = policy(given_terms).loss
    total = (loss if weights is None else weighted(loss, weights)).sum()
    (result,) = torch.autograd.grad(total, given_terms.logprobs)
    return result


def batches(log_probs, *, longest=4):
    """Tokens of a few calls, (call, log π, log π_old, A)."""
    numbers = st.tuples(log_probs, log_probs, st.floats(-3, 3))
    calls = st.lists(st.lists(numbers, min_size=1, max_size=longest), min_size=1, max_size=4)
    return calls.map(lambda drawn: [(c, *t) for c, call in enumerate(drawn) for t in call])


@pytest.mark.parametrize("name", LOSSES)
@given(tokens=batches(st.floats(-4, 0)))
def test_every_loss_matches_its_definition_in_value_and_gradient(name, tokens):
    given_terms = terms(tokens)
    policy = LOSSES[name](given_terms)
    losses, gradients, ratios = reference(name, tokens)
    np.testing.assert_allclose(policy.loss.tolist(), losses, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(policy.ratio.tolist(), ratios, rtol=1e-9)
    got = gradient(LOSSES[name], given_terms)
    np.testing.assert_allclose(got.tolist(), gradients, rtol=1e-9, atol=1e-12)
    assert not policy.ratio.requires_grad


# One token in each region of the clip: ratios 0.5, 1, 1.5 and 4 with either sign, by hand.
REGIONS = example(
    new=[0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 4.0, 4.0],
    advantages=[2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 2.0, -2.0],
    calls=[0, 1, 2, 3, 4, 5, 6, 7],
)


@pytest.mark.parametrize(
    ("name", "losses", "clipped"),
    [
        ("clipped", [-1.0, 1.6, -2.0, 2.0, -2.56, 3.0, -2.56, 8.0], [1, 4, 6]),
        ("dual", [-1.0, 1.6, -2.0, 2.0, -2.56, 3.0, -2.56, 6.0], [1, 4, 6, 7]),
        ("gspo", [-1.0, 1.6, -2.0, 2.0, -2.56, 3.0, -2.56, 8.0], [1, 4, 6]),
        (
            "cispo",  # weights 0.8, 1, 1.28, 1.28 times log 0.5, log 1, log 1.5, log 4
            [1.109035, -1.109035, 0.0, 0.0, -1.037991, 1.037991, -3.548914, 3.548914],
            [0, 1, 4, 5, 6, 7],
        ),
        (
            "reinforce",
            [1.386294, -1.386294, 0.0, 0.0, -0.810930, 0.810930, -2.772589, 2.772589],
            [],
        ),
        ("supervised", [0.693147, 0, 0, 0, -0.405465, 0, -1.386294, 0], []),
        ("by_advantage", [1.386294, 0, 0, 0, -0.810930, 0, -2.772589, 0], []),
    ],
)
def test_each_region_of_the_clip_has_the_loss_computed_by_hand(name, losses, clipped):
    policy = LOSSES[name](REGIONS)
    torch.testing.assert_close(policy.loss, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(policy.ratio, torch.tensor([0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 4.0, 4.0]))
    assert policy.clipped.nonzero().flatten().tolist() == clipped


def test_the_anchor_is_the_policy_of_the_step_and_not_the_one_that_sampled():
    stale = example(new=[1.5], old=[1.5], behaviour=[0.1])
    assert clipped_surrogate(stale, low=LOW, high=HIGH).ratio.tolist() == [1.0]


@pytest.mark.parametrize("name", ["clipped", "dual", "reinforce", "supervised", "by_advantage"])
def test_losses_without_a_stopped_gradient_pass_finite_differences(name):
    # Ratios away from the kinks at 0.8, 1.28 and 3.
    logs = torch.tensor([0.5, 0.9, 1.2, 1.5, 2.5, 4.0], dtype=torch.float64).log()
    new = logs.repeat(2).requires_grad_()
    rest = torch.zeros(12, dtype=torch.float64)
    advantages = torch.tensor([1.5] * 6 + [-0.5] * 6, dtype=torch.float64)

    def loss(logprobs):
        return LOSSES[name](Terms(logprobs, rest, rest, advantages, torch.arange(12))).loss

    assert torch.autograd.gradcheck(loss, (new,))


def test_the_gradient_of_gspo_is_that_of_the_sequence_objective_written_with_its_mean():
    tokens = [(0, -1.0, -1.1, 2.0), (0, -0.5, -0.4, 2.0), (0, -2.0, -2.2, 2.0)]
    tokens += [(1, -1.0, -1.2, -1.0), (1, -3.0, -2.9, -1.0), (2, -1.0, -2.0, 1.0)]

    def objective(new):
        """Σ over calls of −|call|·min(s·A, clip(s)·A), as in equation 5 of the paper."""
        total = 0.0
        for call in (0, 1, 2):
            places = [i for i, token in enumerate(tokens) if token[0] == call]
            advantage = tokens[places[0]][3]
            s = math.exp(sum(new[i] - tokens[i][2] for i in places) / len(places))
            total -= len(places) * min(s * advantage, clip(s, 1 - LOW, 1 + HIGH) * advantage)
        return total

    start, step, slopes = [token[1] for token in tokens], 1e-6, []
    for place in range(len(tokens)):
        up, down = list(start), list(start)
        up[place] += step
        down[place] -= step
        slopes.append((objective(up) - objective(down)) / (2 * step))
    assert slopes[5] == 0  # the third call is clipped
    np.testing.assert_allclose(gradient(LOSSES["gspo"], terms(tokens)).tolist(), slopes, rtol=1e-6)


@given(batches(st.floats(-4, 0), longest=1))
def test_gspo_of_calls_of_one_token_is_the_clip_of_ppo(tokens):
    ours, clips = LOSSES["gspo"](terms(tokens)), LOSSES["clipped"](terms(tokens))
    for mine, theirs in zip(ours, clips, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(
        gradient(LOSSES["gspo"], terms(tokens)), gradient(LOSSES["clipped"], terms(tokens))
    )


def test_a_weight_of_cispo_has_no_gradient_of_its_own():
    # d(r·A·log π)/d log π would be r·A·(1 + log π); with the weight stopped it is r·A.
    inside = terms([(0, -1.0, -1.1, 2.0)])
    want = -2.0 * math.exp(0.1)
    assert gradient(LOSSES["cispo"], inside).item() == pytest.approx(want)


def test_cispo_without_a_lower_bound_keeps_small_ratios_as_they_are():
    policy = cispo(example(new=[0.01, 2.0]), low=1.0, high=4.0)
    torch.testing.assert_close(policy.loss, -torch.tensor([0.01, 2.0]) * policy.ratio.log())
    assert not policy.clipped.any()


def test_imitation_ignores_what_was_not_chosen_and_by_default_how_good_the_chosen_was():
    tokens = [(0, -1.0, -1.0, 0.1), (1, -1.0, -1.0, 5.0), (2, -1.0, -1.0, 0.0)]
    tokens += [(3, -1.0, -1.0, -5.0)]
    assert gradient(supervised, terms(tokens)).tolist() == [-1, -1, 0, 0]
    graded = gradient(LOSSES["by_advantage"], terms(tokens))
    torch.testing.assert_close(graded, torch.tensor([-0.1, -5.0, 0.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("dual", [1.0, 0.5, float("nan")])
def test_a_dual_clip_that_would_stop_every_punishment_is_refused(dual):
    with pytest.raises(ConfigError, match="above 1"):
        clipped_surrogate(REGIONS, low=LOW, high=HIGH, dual=dual)


extreme = batches(st.one_of(st.floats(-1e4, 1e4), st.sampled_from([-1e4, 0.0, 1e4])))


@every_loss
@given(tokens=extreme)
def test_losses_and_gradients_are_finite_however_stale_a_token_is(loss, tokens):
    given_terms = terms(tokens, dtype=torch.float32)
    policy = loss(given_terms)
    assert policy.loss.isfinite().all()
    assert policy.ratio.log().isfinite().all()  # neither 0 nor infinite
    assert gradient(loss, given_terms).isfinite().all()


@every_loss
@given(tokens=extreme, data=st.data())
def test_tokens_that_a_correction_leaves_out_have_no_gradient_and_no_part_in_the_sum(
    loss, tokens, data
):
    given_terms = terms(tokens, dtype=torch.float32)
    drawn = st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))
    kept = torch.tensor(data.draw(drawn))
    got = gradient(loss, given_terms, kept.float())
    assert (got[~kept] == 0).all()
    # The gradient of the others is what it is without the correction.
    torch.testing.assert_close(got[kept], gradient(loss, given_terms)[kept])
    assert (weighted(loss(given_terms).loss, kept.float())[~kept] == 0).all()


def test_a_token_out_of_all_bounds_is_reported_as_clipped_where_it_lost_its_gradient():
    tokens = [(0, 0.0, -30.0, -1.0), (1, 0.0, -30.0, 0.0), (2, 0.0, -10.0, -1.0)]
    policy = LOSSES["clipped"](terms(tokens))
    assert policy.clipped.tolist() == [True, False, False]
    got = gradient(LOSSES["clipped"], terms(tokens)).tolist()
    assert got == [0.0, 0.0, pytest.approx(math.exp(10))]


@every_loss
def test_a_loss_of_no_tokens_is_empty(loss):
    nothing = torch.zeros(0)
    empty = Terms(nothing, nothing, nothing, nothing, number([]))
    assert [column.numel() for column in loss(empty)] == [0, 0, 0]


@every_loss
@pytest.mark.parametrize("column", ["logprobs", "old", "behaviour", "advantages"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_call_with_a_missing_number_excludes_itself_and_nobody_else(loss, column, value):
    tokens = [(0, -1.0, -1.1, 1.0), (1, -0.5, -0.4, -1.0), (1, -0.6, -0.4, -1.0)]
    tokens += [(2, -2.0, -1.7, 0.5)]
    whole = terms(tokens)
    values = getattr(whole, column).detach().clone()
    values[2] = value
    broken = whole._replace(**{column: values.requires_grad_(column == "logprobs")})
    keep = usable(broken)
    assert keep.tolist() == [True, False, False, True]
    left = select(broken, keep)
    assert left.calls.tolist() == [0, 1]
    (got,) = torch.autograd.grad(loss(left).loss.sum(), broken.logprobs)
    want = gradient(loss, terms([(0, *tokens[0][1:]), (1, *tokens[3][1:])]))
    assert got[[1, 2]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(got[[0, 3]], want)


def test_a_weight_of_zero_wins_over_an_infinite_or_missing_loss():
    loss = torch.tensor([float("inf"), float("nan"), 2.0], requires_grad=True)
    total = weighted(loss, torch.tensor([0.0, 0.0, 0.5])).sum()
    total.backward()
    assert total.item() == 1.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [0.0, 0.0, 0.5]


def plain_value_loss(value, old, target, bound):
    """Loss and slope; no slope (None) where two of them meet."""
    held = clip(value, old - bound, old + bound)
    plain, clipped = 0.5 * (value - target) ** 2, 0.5 * (held - target) ** 2
    if abs(value - old) == bound or (held != value and plain == clipped):
        return plain, None
    return (clipped, 0.0) if clipped > plain else (plain, value - target)


@given(
    st.lists(st.tuples(*[st.floats(-3, 3, width=16)] * 3), min_size=1, max_size=8),
    st.floats(0.125, 2, width=16),
)
def test_the_value_loss_matches_its_definition_in_value_and_gradient(rows, bound):
    new, old, target = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    new.requires_grad_()
    got = value_loss(new, old, target, clip=bound)
    want = [plain_value_loss(v, o, r, bound) for v, o, r in rows]
    np.testing.assert_allclose(got.loss.tolist(), [loss for loss, _ in want])
    (slope,) = torch.autograd.grad(got.loss.sum(), new)
    for got_slope, (_, want_slope) in zip(slope.tolist(), want, strict=True):
        assert want_slope is None or got_slope == pytest.approx(want_slope)


def test_the_value_loss_by_hand():
    """V_old 0, c 0.5, R 2. V moves towards R and is held at 0.5; moves away; stays near."""
    new, old = torch.tensor([1.0, -1.0, 0.25]), torch.zeros(3)
    got = value_loss(new, old, torch.full((3,), 2.0), clip=0.5)
    assert got.loss.tolist() == [1.125, 4.5, 1.53125]
    assert got.clipped.tolist() == [True, False, False]
    assert not got.clipped.requires_grad
    free = value_loss(new, old, torch.full((3,), 2.0), clip=None)
    assert free.loss.tolist() == [0.5, 4.5, 1.53125]
    assert not free.clipped.any()


def test_the_value_loss_passes_finite_differences():
    new = torch.tensor([1.0, -1.0, 0.25, 0.1], dtype=torch.float64, requires_grad=True)
    old, target = torch.zeros(4, dtype=torch.float64), torch.tensor([2.0, 2.0, 2.0, -1.0])
    for bound in (0.5, None):
        assert torch.autograd.gradcheck(
            lambda values, bound=bound: value_loss(values, old, target, clip=bound).loss, (new,)
        )
