"""The local engine against fresh Hugging Face forwards of the same weights."""

import asyncio
import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fulmen.engine.base import GenerateRequest
from fulmen.engine.pytorch.attention import prepare
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.engine.pytorch.sampling import choose, uniforms
from fulmen.schema.errors import ContextOverflow, EngineError, ModelError

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}

FAMILIES: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SHAPE)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(head_dim=16, tie_word_embeddings=True, **SHAPE)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(sliding_window=8, **SHAPE)),
    "phimoe-window-in-the-mask-only": lambda: PhimoeForCausalLM(
        PhimoeConfig(sliding_window=8, num_local_experts=4, **SHAPE)
    ),
    "gemma2-caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(head_dim=8, sliding_window=8, query_pre_attn_scalar=8, **SHAPE)
    ),
}


def build(family="qwen3", seed=0):
    torch.manual_seed(seed)
    return FAMILIES[family]().eval()


@contextlib.asynccontextmanager
async def serving(model, **options):
    engine = LocalEngine(model, name="m", max_context=256, **options)
    try:
        yield engine
    finally:
        await engine.close()


def request(prompt, count=12, **options) -> GenerateRequest:
    return GenerateRequest(id="r", prompt_ids=tuple(prompt), max_tokens=count, **options)


async def complete(engine, wanted: GenerateRequest):
    """(ids, log-probabilities, finish reason, version of each token)."""
    ids, logprobs, versions, finish = [], [], [], None
    async for delta in engine.generate(wanted):
        ids += delta.token_ids
        logprobs += delta.logprobs
        versions += [delta.version] * len(delta.token_ids)
        finish = delta.finish_reason
    return ids, logprobs, finish, versions


@torch.no_grad()
def reference(model, prompt, ids, temperature=1.0, top_p=1.0):
    """Log-probabilities of `ids` after `prompt`, by a plain forward over the whole sequence."""
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    logits = own(input_ids=torch.tensor([list(prompt) + list(ids)])).logits[0].float()
    table = torch.log_softmax(logits / (temperature or 1.0), -1)[len(prompt) - 1 : -1]
    if top_p < 1:
        for row in table:
            order = row.argsort(descending=True)
            kept, mass = [], 0.0
            for token in order.tolist():
                kept.append(token)
                mass += row[token].exp().item()
                if mass >= top_p:
                    break
            outside = torch.ones_like(row, dtype=torch.bool)
            outside[kept] = False
            row.masked_fill_(outside, -torch.inf)
            row.sub_(torch.logsumexp(row, 0))
    return [row[token].item() for row, token in zip(table, ids, strict=True)]


PROMPTS = [
    tuple(np.random.default_rng(n).integers(1, 64, size=n).tolist()) for n in (3, 17, 40, 5, 33)
]


@pytest.mark.parametrize("family", FAMILIES)
async def test_log_probabilities_equal_a_fresh_forward_in_every_family(family):
    model = build(family)
    async with serving(model) as engine:
        wanted = [
            request(p, temperature=t, seed=n)
            for n, p in enumerate(PROMPTS)
            for t in (0.0, 0.7, 1.0)
        ]
        got = await asyncio.gather(*(complete(engine, w) for w in wanted))
    for w, (ids, logprobs, _, _) in zip(wanted, got, strict=True):
        want = reference(model, w.prompt_ids, ids, w.temperature)
        np.testing.assert_allclose(logprobs, want, atol=1e-4)


async def test_top_p_samples_from_the_renormalised_nucleus():
    model = build()
    async with serving(model) as engine:
        got = await asyncio.gather(
            *(complete(engine, request(p, top_p=0.6, seed=1)) for p in PROMPTS)
        )
    for prompt, (ids, logprobs, _, _) in zip(PROMPTS, got, strict=True):
        np.testing.assert_allclose(logprobs, reference(model, prompt, ids, top_p=0.6), atol=1e-4)


async def test_a_conversation_reuses_its_prefix_and_stays_exact():
    model = build()
    prompt = PROMPTS[2]
    async with serving(model) as engine:
        for turn in range(4):
            before = engine.stats.prefilled_tokens
            ids, logprobs, _, _ = await complete(engine, request(prompt, 10, seed=turn))
            np.testing.assert_allclose(logprobs, reference(model, prompt, ids), atol=1e-4)
            computed = engine.stats.prefilled_tokens - before
            if turn:
                assert computed <= 16 + 5, "only the new turn and less than a block are computed"
            prompt = prompt + tuple(ids) + (turn + 1,) * 4


async def test_a_group_computes_its_prompt_once():
    async with serving(build()) as engine:
        await asyncio.gather(*(complete(engine, request(PROMPTS[2], seed=n)) for n in range(8)))
        assert engine.stats.prefilled_tokens == 40 + 7 * 8
        assert engine.stats.reused_tokens == 7 * 32


async def test_a_seed_gives_the_same_tokens_alone_and_in_company():
    async with serving(build()) as engine:
        alone = await complete(engine, request(PROMPTS[1], seed=5))
        crowd = [complete(engine, request(p, 30, seed=n)) for n, p in enumerate(PROMPTS * 3)]
        together, *_ = await asyncio.gather(complete(engine, request(PROMPTS[1], seed=5)), *crowd)
    assert together[0] == alone[0]
    np.testing.assert_allclose(together[1], alone[1], atol=1e-5)


async def test_different_seeds_and_no_seed_give_different_tokens():
    async with serving(build()) as engine:
        runs = [await complete(engine, request(PROMPTS[1], 20, seed=s)) for s in (1, 2, None, None)]
    assert len({tuple(ids) for ids, *_ in runs}) == 4


async def test_requests_join_and_leave_without_disturbing_each_other():
    model = build()
    async with serving(model, max_batch=3) as engine:
        wanted = [request(p, 3 + 5 * (n % 4), seed=n) for n, p in enumerate(PROMPTS * 4)]
        got = await asyncio.gather(*(complete(engine, w) for w in wanted))
    for w, (ids, logprobs, finish, _) in zip(wanted, got, strict=True):
        assert len(ids) == w.max_tokens
        assert finish == "length"
        np.testing.assert_allclose(logprobs, reference(model, w.prompt_ids, ids), atol=1e-4)


async def test_a_stop_token_ends_the_completion_and_is_its_last_token():
    async with serving(build()) as engine:
        ids, *_ = await complete(engine, request(PROMPTS[0], 30, seed=0))
        stop = ids[4]
        short, _, finish, _ = await complete(
            engine, request(PROMPTS[0], 30, seed=0, stop_ids=frozenset({stop}))
        )
    assert short == ids[: ids.index(stop) + 1]
    assert finish == "stop"


async def test_without_streaming_everything_comes_in_one_delta():
    async with serving(build()) as engine:
        streamed = [d async for d in engine.generate(request(PROMPTS[0], seed=1))]
        (whole,) = [d async for d in engine.generate(request(PROMPTS[0], seed=1, stream=False))]
    assert len(streamed) == 12
    assert whole.token_ids == tuple(t for d in streamed for t in d.token_ids)
    assert whole.finish_reason == streamed[-1].finish_reason == "length"


async def test_leaving_a_stream_frees_its_place_for_others():
    async with serving(build(), max_batch=1) as engine:
        stream = engine.generate(request(PROMPTS[0], 200))
        await anext(stream)
        waiting = asyncio.ensure_future(complete(engine, request(PROMPTS[1], 4, seed=0)))
        await stream.aclose()
        ids, *_ = await waiting
    assert len(ids) == 4


async def test_the_most_likely_tokens_are_reported_beside_the_sampled_one():
    model = build()
    async with serving(model) as engine:
        (whole,) = [
            d
            async for d in engine.generate(
                request(PROMPTS[0], 3, temperature=0.0, top_logprobs=2, stream=False)
            )
        ]
    assert [pairs[0] for pairs in whole.top] == list(
        zip(whole.token_ids, whole.logprobs, strict=True)
    )
    assert all(len(pairs) == 2 and pairs[0][1] >= pairs[1][1] for pairs in whole.top)


async def test_new_weights_in_mid_generation_are_used_from_the_next_token_on():
    old, live = build(seed=0), build(seed=0)
    prompt = PROMPTS[2]
    async with serving(live, version=3) as engine:
        stream = engine.generate(request(prompt, 60, seed=0))
        ids, logprobs, versions = [], [], []
        for _ in range(2):
            delta = await anext(stream)
            ids += delta.token_ids
            logprobs += delta.logprobs
            versions += [delta.version]
        with engine.updating(4), torch.no_grad():
            for parameter in live.parameters():
                parameter.mul_(1.5)
        async for delta in stream:
            ids += delta.token_ids
            logprobs += delta.logprobs
            versions += [delta.version] * len(delta.token_ids)
        assert engine.version == 4
    switch = versions.index(4)
    assert versions == [3] * switch + [4] * (60 - switch)
    before = reference(old, prompt, ids[:switch])
    after = reference(live, prompt, ids)[switch:]
    np.testing.assert_allclose(logprobs, before + after, atol=1e-4)


async def test_an_update_forgets_prefixes_of_the_old_weights():
    async with serving(build()) as engine:
        await complete(engine, request(PROMPTS[2], 2, seed=0))
        with engine.updating(1):
            pass
        before = engine.stats.reused_tokens
        await complete(engine, request(PROMPTS[2], 2, seed=0))
        assert engine.stats.reused_tokens == before


@pytest.mark.parametrize(("prompt", "count"), [((), 1), ((1,) * 256, 1), ((1,) * 250, 7)])
async def test_what_does_not_fit_the_context_is_refused(prompt, count):
    async with serving(build()) as engine:
        with pytest.raises(ContextOverflow):
            await complete(engine, request(prompt, count))


async def test_the_whole_context_can_be_used():
    async with serving(build()) as engine:
        ids, *_ = await complete(engine, request((1,) * 250, 6, seed=0))
    assert len(ids) == 6


async def test_closing_ends_running_requests_with_an_error():
    engine = LocalEngine(build(), name="m", max_context=256)
    stream = engine.generate(request(PROMPTS[0], 250))
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(EngineError, match="closed"):
        await complete(engine, request(PROMPTS[0]))


async def test_a_broken_forward_is_reported_and_not_waited_for():
    model = build()
    async with serving(model) as engine:
        with engine.updating(1):
            model.lm_head = torch.nn.Linear(7, 7)
        with pytest.raises(EngineError, match="the engine failed"):
            await complete(engine, request(PROMPTS[0]))


def test_a_family_without_a_key_value_cache_is_refused_by_name():
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "state_size": 4,
    }
    with pytest.raises(ModelError, match="mamba"):
        LocalEngine(MambaForCausalLM(MambaConfig(**shape)), name="m", max_context=64)


async def test_bfloat16_weights_are_served_close_to_their_own_forward():
    model = build().bfloat16()
    async with serving(model) as engine:
        ids, logprobs, *_ = await complete(engine, request(PROMPTS[2], seed=0))
    np.testing.assert_allclose(logprobs, reference(model, PROMPTS[2], ids), atol=0.3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_can_be_served_attends_as_it_came_where_it_is_not(family):
    model = build(family)
    ids = torch.tensor([PROMPTS[1]])
    plain = model(input_ids=ids).logits
    prepare(model)
    assert model.config._attn_implementation.startswith("fulmen")
    assert torch.allclose(model(input_ids=ids).logits, plain, atol=1e-6)


def test_tokens_are_drawn_in_proportion_to_their_probability():
    count = 20_000
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5]]).expand(count, 4)
    drawn = uniforms(np.arange(count, dtype=np.uint64), np.full(count, 9))
    ids = choose(logits, torch.ones(count), torch.ones(count), torch.as_tensor(drawn)).ids
    observed = torch.bincount(ids, minlength=4).double()
    expected = torch.softmax(logits[0].double(), -1) * count
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 16.27, "0.1 % of fair draws are further off (3 degrees of freedom)"


def test_random_numbers_of_neighbouring_seeds_and_positions_are_unrelated():
    grid = np.stack([uniforms(np.arange(200, dtype=np.uint64), np.full(200, p)) for p in range(50)])
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03
    assert abs(grid.mean() - 0.5) < 0.01
