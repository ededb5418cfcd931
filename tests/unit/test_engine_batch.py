"""Batches, step by step: whoever shares a pass gets the tokens that its model alone would give."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, cast

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from fulmen.engine.adapters import AdapterConfig, adapter_parameters, add_adapter, merged_weights
from fulmen.engine.base import GenerateRequest
from fulmen.engine.pytorch.attention import prepare
from fulmen.engine.pytorch.batch import Batch
from fulmen.engine.pytorch.sequence import Sequence
from models import small_model, tiny_model

Make = Callable[[], PreTrainedModel]
Alone = dict[str | None, PreTrainedModel]
"""By adapter, a plain model of Hugging Face's that computes the same."""

PREFIX = tuple(7 * place % 39 + 1 for place in range(48))
"""Three full blocks of the prefix cache, a block less than what slots grow by."""
PROMPT = PREFIX[:21]


def dense() -> PreTrainedModel:
    return tiny_model(initializer_range=0.3)


def windowed() -> PreTrainedModel:
    """Of a family that is served by its own modules."""
    changes = {"vocab_size": 40, "sliding_window": 24, "initializer_range": 0.3}
    return small_model(MistralForCausalLM, MistralConfig, **changes)


def stir(model: PreTrainedModel, name: str, seed: int) -> None:
    """As training would: the adapter says something of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model, name).values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def with_adapters(make: Make) -> tuple[PreTrainedModel, Alone]:
    """A model with two adapters, and plain ones that are the base and each of them."""
    model = make()
    alone: Alone = {None: make()}
    for seed, name in enumerate("ab"):
        add_adapter(model, AdapterConfig(rank=3, alpha=4), name)
        stir(model, name, seed)
        alone[name] = make()
        alone[name].load_state_dict(merged_weights(model, name), strict=False)
    return model, alone


def batch_of(model: PreTrainedModel) -> Batch:
    prepare(model)
    return Batch(model, max_batch=8, prefix_bytes=2**20)


def greedy(prompt: tuple[int, ...], adapter: str | None = None) -> Sequence:
    request = GenerateRequest("r", prompt, max_tokens=99, temperature=0)
    return Sequence(request, cast(Any, None), adapter=adapter)


@torch.no_grad()
def step(batch: Batch, wave: Items[Sequence], max_tokens: int, alone: Alone) -> None:
    """Every sequence gets a token, the one that its model alone finds the most likely."""
    sampled = batch.step(wave, max_tokens)
    found = zip(batch.sequences, sampled.ids, sampled.logprobs, strict=True)
    for place, (sequence, token, logprob) in enumerate(found):
        logits = alone[sequence.adapter](input_ids=torch.tensor([sequence.ids])).logits
        want, best = logits[0, -1].log_softmax(-1).max(-1)
        assert (place, token) == (place, best.item())
        assert logprob == pytest.approx(want.item(), abs=1e-4)
        sequence.append(token, logprob, 0, None)


@pytest.mark.parametrize("make", [dense, windowed])
@pytest.mark.parametrize("max_tokens", [4096, 8])
def test_a_long_known_prefix_beside_a_longer_new_prompt_disturbs_nobody(
    make: Make, max_tokens: int
):
    """Padding goes on to place 77, beyond all tokens and beyond the 64 that slots begin with."""
    batch = batch_of(make())
    alone: Alone = {None: make()}
    step(batch, [greedy((*PREFIX, 5))], max_tokens, alone)
    step(batch, [greedy(PREFIX[5:16])], max_tokens, alone)
    assert batch.reused_tokens == 0
    known, new = greedy((*PREFIX, *range(20, 32))), greedy(tuple(range(30, 0, -1)))
    step(batch, [known, new], max_tokens, alone)
    assert batch.reused_tokens == 48
    for _ in range(6):
        step(batch, [], max_tokens, alone)
    assert [s.sampled for s in batch.sequences] == [9, 8, 7, 7]


@pytest.mark.parametrize("make", [dense, windowed])
@pytest.mark.parametrize("max_tokens", [4096, 8])
@pytest.mark.parametrize(
    "waves",
    [
        [["a"], ["b", None]],
        [["b"], [None, "a"]],
        [[None], ["a", "b"]],
        [["a", None], ["b"], [None, "b", "a"]],
    ],
)
def test_prompts_of_one_adapter_are_computed_beside_what_another_has_at_work(
    make: Make, max_tokens: int, waves: list[list[str | None]]
):
    model, alone = with_adapters(make)
    batch = batch_of(model)
    for number, wave in enumerate(waves):
        new = [greedy((number + 1, *PROMPT[place:]), name) for place, name in enumerate(wave)]
        step(batch, new, max_tokens, alone)
    for _ in range(4):
        step(batch, [], max_tokens, alone)
    assert [s.adapter for s in batch.sequences] == [name for wave in waves for name in wave]


@pytest.mark.parametrize("make", [dense, windowed])
def test_the_same_prompt_goes_on_differently_under_each_adapter_of_a_batch(make: Make):
    model, alone = with_adapters(make)
    batch = batch_of(model)
    for name in ("a", "b", None):
        step(batch, [greedy(PROMPT, name)], 4096, alone)
    for _ in range(4):
        step(batch, [], 4096, alone)
    assert batch.reused_tokens == 0
    assert len({tuple(s.ids[:25]) for s in batch.sequences}) == 3
