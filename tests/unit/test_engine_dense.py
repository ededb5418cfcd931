"""The hand-written forward pass: when it is used, and that it is the same function."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fulmen.engine.adapters import AdapterConfig, add_adapter
from fulmen.engine.base import GenerateRequest
from fulmen.engine.pytorch.attention import CacheView
from fulmen.engine.pytorch.dense import DenseForward, Part, supports
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.engine.pytorch.prefix import BLOCK, PrefixCache
from fulmen.schema.errors import EngineError

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SHAPE)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(head_dim=16, tie_word_embeddings=True, **SHAPE)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama-biases": lambda: LlamaForCausalLM(
        LlamaConfig(attention_bias=True, mlp_bias=True, **SHAPE)
    ),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(rope_parameters=LLAMA3_ROPE, **SHAPE)),
}


def build(family="qwen3") -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def cache_for(model, slots, length):
    width = model.model.layers[0].self_attn.head_dim
    return torch.zeros(2 * SHAPE["num_hidden_layers"], slots, 2, length, width)


@torch.no_grad()
def in_pieces(model, ids, cuts):
    """Logits (P, C, V), the columns of `ids` computed piece by piece over one cache."""
    dense = DenseForward(model)
    cache = cache_for(model, len(ids), 64)
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        positions = torch.arange(start, stop).expand(len(ids), -1)
        parts += dense.hidden([Part(ids[:, start:stop], CacheView(cache, 0, positions, stop))])
    hidden = torch.cat(parts, dim=1)
    return dense.project(hidden.flatten(0, 1)).view(*ids.shape, -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_or_in_pieces_it_computes_the_models_logits(family):
    model = build(family)
    assert supports(model)
    ids = torch.randint(1, 50, (3, 30))
    with torch.no_grad():
        want = model(input_ids=ids).logits
    for cuts in ((), (13,), (13, 29), tuple(range(1, 30))):
        np.testing.assert_allclose(in_pieces(model, ids, cuts), want, atol=2e-5)


@torch.no_grad()
def test_sequences_at_work_and_new_ones_are_one_pass_and_do_not_see_each_other():
    """Two are a token further, three begin: with what each would have had alone."""
    model = build()
    dense, cache = DenseForward(model), cache_for(model, 5, 64)
    old, new = torch.randint(1, 50, (2, 12)), torch.randint(1, 50, (3, 7))
    before = torch.arange(11).expand(2, -1)
    dense.hidden([Part(old[:, :11], CacheView(cache, 0, before, 11))])
    at_work = Part(old[:, 11:], CacheView(cache, 0, torch.full((2, 1), 11), 12))
    begun = Part(new, CacheView(cache, 2, torch.arange(7).expand(3, -1), 7))
    first, second = dense.hidden([at_work, begun])
    np.testing.assert_allclose(
        dense.project(first[:, 0]), model(input_ids=old).logits[:, -1], atol=2e-5
    )
    np.testing.assert_allclose(
        dense.project(second[:, -1]), model(input_ids=new).logits[:, -1], atol=2e-5
    )


@pytest.mark.parametrize("family", ["qwen3-tied", "llama-biases"])
def test_an_adapter_is_added_to_the_weights(family):
    model = build(family)
    ids = torch.randint(1, 50, (3, 30))
    with torch.no_grad():
        before = model(input_ids=ids).logits
    add_adapter(model, AdapterConfig(rank=3, alpha=6))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
        want = model(input_ids=ids).logits
    assert supports(model)
    assert (want - before).abs().max() > 0.1
    np.testing.assert_allclose(in_pieces(model, ids, (13, 29)), want, atol=5e-5)


def test_new_weights_are_served_after_a_refresh():
    model = build()
    dense = DenseForward(model)
    ids = torch.randint(1, 50, (2, 9))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        dense.refresh()
        view = CacheView(cache_for(model, 2, 16), 0, torch.arange(9).expand(2, -1), 9)
        got = dense.project(dense.hidden([Part(ids, view)])[0][:, -1])
        want = model(input_ids=ids).logits[:, -1]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_what_it_would_compute_wrongly_is_left_to_the_models_own_modules():
    wrapped = build("llama")
    wrapped.model.layers[1].mlp.up_proj = AdaptedLinear(32, 48, bias=False)
    others = {
        "bfloat16": build().bfloat16(),
        "adapter": wrapped,
        "window": MistralForCausalLM(MistralConfig(sliding_window=8, **SHAPE)),
        "sliding layers": Qwen2ForCausalLM(
            Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, **SHAPE)
        ),
        "activation": LlamaForCausalLM(LlamaConfig(hidden_act="gelu", **SHAPE)),
    }
    assert {name: supports(model) for name, model in others.items()} == dict.fromkeys(others, False)


class AdaptedLinear(torch.nn.Linear):
    """Stands for LoRA: a linear layer that adds something of its own."""


async def test_the_learner_can_train_the_weights_that_were_served():
    model = build()
    engine = LocalEngine(model, name="m", max_context=128)
    async for _ in engine.generate(ask()):
        pass
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    await engine.close()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


async def test_logits_that_are_no_numbers_are_an_error_not_a_token():
    model = build()
    engine = LocalEngine(model, name="m", max_context=128)
    with engine.updating(1), torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite"):
        async for _ in engine.generate(ask()):
            pass
    await engine.close()


async def test_an_update_that_fails_half_way_ends_the_engine():
    engine = LocalEngine(build(), name="m", max_context=128)
    stream = engine.generate(ask(100))
    await anext(stream)
    with pytest.raises(ZeroDivisionError), engine.updating(1):
        raise ZeroDivisionError
    with pytest.raises(EngineError, match="failed half-way"):
        async for _ in stream:
            pass
    await asyncio.wait_for(engine.close(), 10)


def test_a_full_prefix_cache_keeps_the_beginnings_of_what_was_used_last():
    like = torch.zeros(1)
    cache = PrefixCache(heads=1, width=1, planes=1, max_bytes=3 * BLOCK * 4, like=like)
    slot = torch.arange(4 * BLOCK, dtype=torch.float32).view(1, 1, -1, 1)
    old, new = [1] * (2 * BLOCK), [2] * (2 * BLOCK)
    cache.store(old, slot)
    cache.store(new, slot)
    assert [len(cache.match([*ids, 9])[0]) for ids in (old, new)] == [1, 2]
    cache.store([3] * (4 * BLOCK), slot)
    assert len(cache.match([3] * (4 * BLOCK) + [9])[0]) == 3, (
        "as much of a long one as there is room"
    )


def test_restored_blocks_hold_what_was_stored():
    like = torch.zeros(1)
    cache = PrefixCache(heads=2, width=3, planes=2, max_bytes=1 << 20, like=like)
    slot = torch.randn(2, 2, 3 * BLOCK, 3)
    ids = list(range(3 * BLOCK))
    cache.store(ids, slot)
    restored = torch.zeros_like(slot)
    cache.load(cache.match([*ids, 9])[0], restored)
    assert torch.equal(restored, slot)


def ask(count=8) -> GenerateRequest:
    return GenerateRequest(id="r", prompt_ids=(1, 2, 3, 4), max_tokens=count, seed=0)
