"""Policies that are adapters of one model: sampled in one batch, and each as if it were alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from fulmen.engine.adapted import Rows, chosen
from fulmen.engine.adapters import (
    AdapterConfig,
    adapter_names,
    adapter_parameters,
    add_adapter,
    load_adapter,
    merged_weights,
    save_adapter,
)
from fulmen.engine.base import GenerateRequest
from fulmen.engine.pytorch.dense import supports
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.learner.activations import checkpoint_layers
from fulmen.schema.errors import ConfigError, EngineError, ModelError
from models import TINY, tiny_model

NAMES = ("a", "b", "c")
ATTENTION = ("q_proj", "v_proj")
PROMPT = tuple(range(1, 38))
"""Two full blocks of the prefix cache, and a rest."""


def dense(**changes: Any) -> PreTrainedModel:
    return tiny_model(max_position_embeddings=256, initializer_range=0.3, **changes)


def windowed() -> PreTrainedModel:
    """Of a family that is served by its own modules."""
    torch.manual_seed(0)
    config = MistralConfig(**TINY, sliding_window=8, initializer_range=0.3)
    return MistralForCausalLM(config).eval()


def with_biases() -> PreTrainedModel:
    model = dense(attention_bias=True, tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def stir(model: PreTrainedModel, name: str, seed: int) -> None:
    """As training would: the adapter says something of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model, name).values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def shared(model: PreTrainedModel, targets: Sequence[str] = ()) -> PreTrainedModel:
    """A model with three adapters."""
    for seed, name in enumerate(NAMES):
        add_adapter(model, AdapterConfig(rank=3, alpha=4, targets=tuple(targets)), name)
        stir(model, name, seed)
    return model


def merged(make, model: PreTrainedModel, name: str | None) -> PreTrainedModel:
    """A model without adapters that is one of them, or none."""
    alone = make()
    if name is not None:
        alone.load_state_dict(merged_weights(model, name), strict=False)
    return alone


@asynccontextmanager
async def served(model: PreTrainedModel) -> AsyncIterator[dict[str | None, LocalEngine]]:
    """An engine for each adapter and one for the model without, in one thread."""
    base = LocalEngine(model, name="base", max_context=128)
    engines: dict[str | None, LocalEngine] = {None: base}
    for version, name in enumerate(NAMES):
        engines[name] = base.beside(name=name, adapter=name, version=10 * version)
    try:
        yield engines
    finally:
        for engine in engines.values():
            await engine.close()


class Answer(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    versions: list[int]


async def complete(engine: LocalEngine, prompt=PROMPT, count=20, seed=0) -> Answer:
    request = GenerateRequest(id="r", prompt_ids=prompt, max_tokens=count, seed=seed)
    answer = Answer([], [], [])
    async for delta in engine.generate(request):
        answer.ids.extend(delta.token_ids)
        answer.logprobs.extend(delta.logprobs)
        answer.versions.extend([delta.version] * len(delta.token_ids))
    return answer


async def alone(model: PreTrainedModel, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    engine = LocalEngine(model, name="alone", max_context=128)
    answers = [await complete(engine, prompt, seed=seed) for seed, prompt in enumerate(prompts)]
    await engine.close()
    return answers


@pytest.mark.parametrize(
    ("make", "targets", "by_hand"),
    [
        (dense, (), True),
        (dense, ATTENTION, True),
        (with_biases, ("q_proj", "up_proj", "down_proj", "lm_head"), True),
        (windowed, (), False),
        (windowed, ("k_proj", "o_proj"), False),
    ],
)
async def test_in_one_batch_each_row_is_sampled_as_by_its_adapter_alone(make, targets, by_hand):
    model = shared(make(), targets)
    assert supports(model) is by_hand
    prompts = [PROMPT, PROMPT[:5], (7, *PROMPT)]
    async with served(model) as engines:
        work = [
            (name, complete(engine, prompt, seed=seed))
            for seed, prompt in enumerate(prompts)
            for name, engine in engines.items()
        ]
        answers = await asyncio.gather(*(answer for _, answer in work))
    first = set()
    for name in (None, *NAMES):
        own = [a for (of, _), a in zip(work, answers, strict=True) if of == name]
        want = await alone(merged(make, model, name), prompts)
        assert [a.ids for a in own] == [a.ids for a in want]
        got, expected = (torch.tensor([a.logprobs for a in some]) for some in (own, want))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        first.add(tuple(own[0].ids))
    assert len(first) == 4, "no two policies say the same"


async def test_the_same_prompt_is_computed_anew_for_every_adapter_and_once_for_each():
    model = shared(dense())
    async with served(model) as engines:
        for turn in range(2):
            for name in NAMES:
                before = engines[name].stats
                answer = await complete(engines[name], count=1)
                after = engines[name].stats
                assert after.reused_tokens - before.reused_tokens == (32 if turn else 0)
                (want,) = await alone(merged(dense, model, name), [PROMPT])
                assert answer.ids == want.ids[:1]


async def test_an_update_of_one_adapter_does_not_disturb_the_others():
    model = shared(dense())
    async with served(model) as engines:
        a, b = engines["a"], engines["b"]
        undisturbed = await complete(b, count=60)
        streams = [engine.generate(GenerateRequest("r", PROMPT, 60, seed=0)) for engine in (a, b)]
        firsts = [await anext(stream) for stream in streams]
        await complete(b, count=1)
        computed = a.stats.prefilled_tokens
        with a.updating(5):
            stir(model, "a", 77)
        versions = [{first.version} for first in firsts]
        ids = [list(first.token_ids) for first in firsts]
        for stream, seen, own in zip(streams, versions, ids, strict=True):
            async for delta in stream:
                seen.add(delta.version)
                own.extend(delta.token_ids)
        assert (a.version, b.version, engines["c"].version) == (5, 10, 20)
        assert versions == [{0, 5}, {10}]
        assert ids[1] == undisturbed.ids
        assert a.stats.prefilled_tokens > computed, "what `a` had under way is computed anew"
        before = a.stats.reused_tokens
        await complete(b, count=1)
        assert a.stats.reused_tokens - before == 32, "what is known of `b` is still known"
        (want,) = await alone(merged(dense, model, "a"), [PROMPT])
        assert (await complete(a)).ids == want.ids


async def test_an_engine_that_is_closed_ends_its_own_requests_only():
    async with served(shared(dense())) as engines:
        ending, staying = (
            engines[name].generate(GenerateRequest("r", PROMPT, 60, seed=0)) for name in "ab"
        )
        for stream in (ending, staying):
            await anext(stream)
        await engines["a"].close()
        with pytest.raises(EngineError, match="closed"):
            async for _ in ending:
                pass
        with pytest.raises(EngineError, match="closed"):
            await complete(engines["a"])
        assert [d async for d in staying][-1].finish_reason == "length"
        assert len((await complete(engines["b"])).ids) == 20


async def test_an_adapter_has_one_engine():
    async with served(shared(dense())) as engines:
        with pytest.raises(ValueError, match="'a' has an engine already"):
            engines["b"].beside(name="again", adapter="a")


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT])).logits


def test_of_several_adapters_one_has_to_be_chosen():
    model = shared(dense())
    with pytest.raises(ValueError, match="one of the adapters a, b, c has to be chosen"):
        logits(model)
    with chosen(None):
        torch.testing.assert_close(logits(model), logits(dense()))


def test_rows_of_another_size_than_the_input_are_refused():
    model = shared(dense())
    with (
        chosen(Rows.of(["a", "b"], 3, torch.device("cpu"))),
        pytest.raises(ModelError, match="no several adapters"),
    ):
        logits(model)


def test_an_adapter_beside_others_is_the_one_that_it_would_be_alone(tmp_path):
    both, one = dense(), dense()
    for seed, name in enumerate(("default", "second")):
        add_adapter(both, AdapterConfig(rank=2, alpha=4, seed=seed), name)
    add_adapter(one, AdapterConfig(rank=2, alpha=4, seed=1))
    ours, theirs = adapter_parameters(both, "second"), adapter_parameters(one, "default")
    assert adapter_names(both) == ["default", "second"]
    assert ours.keys() == theirs.keys() == {n for n, p in one.named_parameters() if p.requires_grad}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(p.requires_grad is (".lora_" in name) for name, p in both.named_parameters())
    stir(both, "second", 3)
    save_adapter(both, tmp_path / "both", "second")
    load_adapter(one, tmp_path / "both")
    save_adapter(one, tmp_path / "one")
    alone = logits(one)
    with chosen("second"):
        assert torch.equal(logits(both), alone)
    folders = [tmp_path / place / "adapter" for place in ("both", "one")]
    weights = [(folder / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    told = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    for config in told:
        config["target_modules"].sort()
    assert told[0] == told[1]


def test_layers_that_are_computed_again_are_computed_with_the_same_adapter():
    gradients = []
    for again in (False, True):
        model = shared(dense())
        if again:
            checkpoint_layers(model)
        with chosen("b"):
            loss = model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss
        loss.backward()  # here nothing is chosen
        assert all(p.grad is None for p in adapter_parameters(model, "a").values())
        gradients.append([p.grad for p in adapter_parameters(model, "b").values()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_experts_of_a_shared_base_have_no_adapters():
    model: Any = dense()
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(16, 16)])
    config = AdapterConfig(rank=2, alpha=4)
    add_adapter(model, config, "a")
    with pytest.raises(ConfigError, match="experts have adapters"):
        add_adapter(model, config, "b")


def test_what_is_no_linear_layer_has_no_adapter():
    with pytest.raises(ConfigError, match="embed_tokens is an embedding"):
        add_adapter(dense(), AdapterConfig(rank=2, alpha=4, targets=("embed_tokens",)))
