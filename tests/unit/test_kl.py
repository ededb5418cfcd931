"""KL estimates: their values and, what counts in a loss, their expected gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen.learner.kl import k1, k2, k3
from fulmen.schema.errors import ConfigError

REFERENCE = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log()


def logits() -> torch.Tensor:
    return torch.tensor([0.3, -0.2, 1.1, 0.0], dtype=torch.float64, requires_grad=True)


def expected_gradient(estimate) -> torch.Tensor:
    """E over tokens of π of ∇ estimate, exactly: every token, weighted with what π gives it."""
    start = logits()
    logprobs = torch.log_softmax(start, -1)
    (result,) = torch.autograd.grad(
        (logprobs.detach().exp() * estimate(logprobs, REFERENCE)).sum(), start
    )
    return result


def true_gradient(divergence) -> torch.Tensor:
    start = logits()
    (result,) = torch.autograd.grad(divergence(torch.log_softmax(start, -1)), start)
    return result


def reverse(logprobs):
    """KL(π ‖ π_ref)."""
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def forward(logprobs):
    """KL(π_ref ‖ π)."""
    return (REFERENCE.exp() * (REFERENCE - logprobs)).sum()


@pytest.mark.parametrize("estimate", [k1, k3])
def test_k1_and_k3_average_to_the_true_divergence(estimate):
    logprobs = torch.log_softmax(logits().detach(), -1)
    torch.testing.assert_close(
        (logprobs.exp() * estimate(logprobs, REFERENCE)).sum(), reverse(logprobs)
    )


def test_k2_does_not_average_to_the_divergence_but_comes_near_it_near_the_reference():
    far = torch.log_softmax(logits().detach(), -1)
    assert (far.exp() * k2(far, REFERENCE)).sum() > 1.05 * reverse(far)
    near = torch.log_softmax(REFERENCE + 1e-3 * logits().detach(), -1)
    torch.testing.assert_close(
        (near.exp() * k2(near, REFERENCE)).sum(), reverse(near), rtol=1e-2, atol=0
    )


def test_the_gradient_of_k2_in_the_loss_is_that_of_the_reverse_divergence():
    torch.testing.assert_close(expected_gradient(k2), true_gradient(reverse))


def test_the_gradient_of_k3_in_the_loss_is_that_of_the_forward_divergence():
    torch.testing.assert_close(expected_gradient(k3), true_gradient(forward))
    assert not torch.allclose(true_gradient(forward), true_gradient(reverse), atol=1e-2)


def test_k1_would_have_no_gradient_on_average_and_so_is_refused_in_a_loss():
    plain = expected_gradient(lambda logprobs, reference: logprobs - reference)
    torch.testing.assert_close(plain, torch.zeros_like(plain))
    with pytest.raises(ConfigError, match="use k2"):
        k1(torch.zeros(1, requires_grad=True), torch.zeros(1))


@given(st.floats(-20, 20))
def test_each_estimate_is_its_formula(delta):
    new, old = torch.tensor([delta - 30], dtype=torch.float64), torch.tensor([-30.0]).double()
    drawn = (new - old).item()
    assert k1(new, old).item() == drawn
    assert k2(new, old).item() == pytest.approx(drawn**2 / 2, rel=1e-12)
    assert k3(new, old).item() == pytest.approx(math.exp(-drawn) + drawn - 1, rel=1e-9, abs=1e-12)


def test_each_estimate_by_hand():
    new, old = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    torch.testing.assert_close(k1(new, old), torch.tensor([0.693147, -0.693147]))
    torch.testing.assert_close(k2(new, old), torch.tensor([0.240227, 0.240227]))
    torch.testing.assert_close(k3(new, old), torch.tensor([0.193147, 0.306853]))


@pytest.mark.parametrize("estimate", [k2, k3])
def test_estimates_in_the_loss_pass_finite_differences(estimate):
    new = torch.linspace(-5, 5, 11, dtype=torch.float64).add(0.05).requires_grad_()
    reference = torch.zeros(11, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logprobs: estimate(logprobs, reference), (new,))


def slope(estimate, delta) -> float:
    new = torch.tensor([delta], requires_grad=True)
    value = estimate(new, torch.zeros(1))
    assert value.isfinite().all()
    (result,) = torch.autograd.grad(value.sum(), new)
    return result.item()


def test_far_from_the_reference_the_pull_back_is_bounded_and_never_in_the_wrong_direction():
    assert [slope(k2, delta) for delta in (-1e4, -3.0, 3.0, 1e4)] == [-20, -3, 3, 20]
    assert [slope(k3, delta) for delta in (-1e4, 1e4)] == [0, 1]
    assert slope(k3, -19.0) == pytest.approx(1 - math.exp(19), rel=1e-5)


def test_close_to_the_reference_float32_does_not_lose_the_estimate():
    new, old = torch.tensor([-1.0]), torch.tensor([-1.001])
    true = math.exp(-(new - old).item()) + (new - old).item() - 1
    assert k3(new, old).item() == pytest.approx(true, rel=1e-3)
