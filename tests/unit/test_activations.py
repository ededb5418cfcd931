"""Layers computed twice: equal gradients, less kept."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fulmen.learner.activations import checkpoint_layers

SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
IDS = torch.arange(1, 31).view(2, 15)


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, attention_dropout=0.5)).eval()


class Kept:
    """Bytes that a forward pass keeps for the backward pass, weights left out."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._weights = {parameter.data_ptr() for parameter in model.parameters()}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self._weights:
            self.bytes += tensor.numel() * tensor.element_size()
        return tensor


def gradients(model: PreTrainedModel) -> tuple[dict[str, Tensor], int]:
    """Gradients of a loss, and the bytes kept on the way."""
    kept = Kept(model)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, kept.bytes


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_are_equal_and_far_less_is_kept(family):
    model = make(family)
    want, much = gradients(model)
    checkpoint_layers(model)
    assert not any(module.training for module in model.modules()), "no dropout"
    got, little = gradients(model)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(gradient, got[name]), name
    assert little < 0.3 * much


def test_without_gradients_layers_run_as_before():
    model = make("qwen3")
    with torch.no_grad():
        want = model(input_ids=IDS).logits
        checkpoint_layers(model)
        assert torch.equal(model(input_ids=IDS).logits, want)
        assert model.generate(IDS[:1, :4], max_new_tokens=3).shape == (1, 7)  # type: ignore[operator]


def test_a_copy_of_the_model_computes_with_its_own_weights():
    model = make("qwen3")
    checkpoint_layers(model)
    twin = copy.deepcopy(model)
    want = model(input_ids=IDS).logits.detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(input_ids=IDS).logits, want)
