"""The optimiser's arithmetic: masters in float32, wherever they live, and the schedule."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from fulmen.learner.optimiser import Optimiser, OptimiserConfig


def weight(value: float, dtype: torch.dtype) -> nn.Linear:
    """One number as a module."""
    module = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        module.weight.fill_(value)
    return module


def language_model(dtype: torch.dtype) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    nn.Module.to(model, dtype)
    return model


def learn(model: Qwen3ForCausalLM, steps: int, offload: bool = False) -> list[float]:
    """Losses of learning a few random sequences by heart."""
    ids = torch.randint(40, (8, 12), generator=torch.Generator().manual_seed(1))
    optimiser = Optimiser(model, OptimiserConfig(learning_rate=1e-3, offload=offload))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.clip()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_bfloat16_weights_move_by_steps_too_small_for_bfloat16():
    """0.01 % of a weight is below bfloat16's resolution; masters in float32 add it up."""
    module = weight(1.0, torch.bfloat16)
    optimiser = Optimiser(module, OptimiserConfig(learning_rate=1e-4))
    for _ in range(50):
        module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimiser.step()
    assert module.weight.item() == pytest.approx(0.995, abs=0.003)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_are_summed_in_float32(dtype, offload):
    """In bfloat16, 256 + 1 is 256."""
    module = weight(1.0, dtype)
    optimiser = Optimiser(module, OptimiserConfig(1e-3, max_grad_norm=1.0, offload=offload))
    for _ in range(300):
        module(torch.ones(1, 1, dtype=dtype)).sum().backward()
    assert optimiser.clip() == pytest.approx(300)


def test_micro_batches_make_the_step_of_one_batch():
    whole, split = language_model(torch.float32), language_model(torch.float32)
    ids = torch.randint(40, (6, 10), generator=torch.Generator().manual_seed(2))
    norms = []
    for model, parts in ((whole, 1), (split, 3)):
        optimiser = Optimiser(model, OptimiserConfig(learning_rate=1e-2))
        for part in ids.chunk(parts):
            (model(input_ids=part, labels=part).loss / parts).backward()
        norms.append(optimiser.clip())
        optimiser.step()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    # Adam's first step is the sign of the gradient, so a gradient of 0 may go either way.
    assert closeness(whole, split) < 1e-3


def closeness(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.float() - b.float()).abs().median().item() for a, b in pairs)


def test_bfloat16_with_masters_learns_as_float32_does():
    exact = learn(language_model(torch.float32), 60)
    coarse = learn(language_model(torch.bfloat16), 60)
    assert exact[-1] < 0.75 * exact[0], "there is something to compare"
    for want, got in zip(exact, coarse, strict=True):
        assert got == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_optimiser_lives_changes_nothing(dtype):
    here, away = language_model(dtype), language_model(dtype)
    assert learn(here, 5) == learn(away, 5, offload=True)
    for a, b in zip(here.parameters(), away.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimiser_goes_on_exactly_where_another_was(dtype, offload):
    def step(module: nn.Linear, optimiser: Optimiser) -> float:
        module(torch.ones(1, 1, dtype=dtype)).square().sum().backward()
        optimiser.step()
        return module.weight.item()

    config = OptimiserConfig(learning_rate=0.1, warmup_steps=9, offload=offload)
    module, twin = weight(1.0, dtype), weight(7.0, dtype)
    optimiser, goes_on = Optimiser(module, config), Optimiser(twin, config)
    step(module, optimiser)
    twin.load_state_dict(module.state_dict())
    for name, tensor in goes_on.tensors().items():
        tensor.copy_(optimiser.tensors()[name])
    goes_on.steps_done = optimiser.steps_done
    for _ in range(3):
        assert step(module, optimiser) == step(twin, goes_on)


def test_an_optimiser_that_is_gone_takes_no_gradients():
    module = weight(1.0, torch.bfloat16)
    Optimiser(module, OptimiserConfig(1e-3))
    module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad is not None


@settings(max_examples=20)
@given(st.integers(0, 30))
def test_the_linear_schedule_never_rises_after_warm_up(step):
    config = OptimiserConfig(1.0, warmup_steps=5, schedule="linear", total_steps=20)
    assert config.rate(step + 5) >= config.rate(step + 6) >= 0.05


@pytest.mark.parametrize("warmup", [0, 1, 5, 19])
def test_the_linear_schedule_falls_from_the_full_rate_after_warm_up_to_a_twentieth(warmup):
    config = OptimiserConfig(2.0, warmup_steps=warmup, schedule="linear", total_steps=20)
    rates = [config.rate(step) for step in range(20)]
    peak = max(warmup - 1, 0)
    assert max(rates) == rates[peak] == 2.0
    assert rates[-1] == pytest.approx(0.1)
    falls = [before - after for before, after in zip(rates[peak:], rates[peak + 1 :], strict=False)]
    assert falls == pytest.approx([1.9 / (19 - peak)] * (19 - peak))


def test_parameters_of_some_names_learn_faster():
    """The first step of Adam is as long as the rate, whatever the gradient."""
    module = nn.ModuleDict(
        {"policy": weight(1.0, torch.float32), "head": weight(1.0, torch.float32)}
    )
    optimiser = Optimiser(module, OptimiserConfig(1e-3, warmup_steps=2, faster=(("head.", 10.0),)))
    torch.cat([one(torch.ones(1, 1)) for one in module.values()]).sum().backward()
    assert optimiser.step() == 5e-4
    moved = [1.0 - one.get_parameter("weight").item() for one in module.values()]
    assert moved == pytest.approx([5e-4, 5e-3], rel=1e-3)
