"""Sampling under a grammar: what is allowed, what is sampled, and how it is scored."""

import asyncio
import contextlib
import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from batches import batch_of, batches
from fulmen.engine.base import GenerateRequest
from fulmen.engine.grammar import GrammarCompiler, Matcher
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.engine.pytorch.masks import FORBIDDEN
from fulmen.engine.pytorch.sampling import choose
from fulmen.learner.learner import Learner
from fulmen.learner.logprobs import score
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.schema.errors import GrammarError
from fulmen.schema.records import Credited, Transition
from models import tiny_model

BASE = Path(__file__).parents[2] / "examples/calc/base"
VOCAB = 500
"""More than the tokenizer has: embeddings are padded."""
STOP = 2
TWO_DIGITS = "start: /[0-9]{2}/"
PERSON = "start: %json " + json.dumps(
    {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 130}},
        "required": ["age"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(BASE)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB, frozenset({STOP}))


@pytest.fixture(scope="module")
def model():
    return tiny_model(
        vocab_size=VOCAB,
        hidden_size=32,
        head_dim=16,
        initializer_range=0.3,
        max_position_embeddings=256,
    )


@contextlib.asynccontextmanager
async def serving(model, compiler):
    engine = LocalEngine(model, name="m", max_context=256, grammars=compiler)
    try:
        yield engine
    finally:
        await engine.close()


async def sample(engine, grammar, seed=0, **options: Any):
    request = GenerateRequest(
        id=f"{grammar[:5]}{seed}",
        prompt_ids=(5, 6, 7),
        max_tokens=options.pop("max_tokens", 40),
        stop_ids=frozenset({STOP}),
        seed=seed,
        grammar=grammar,
        **options,
    )
    deltas = [delta async for delta in engine.generate(request)]
    ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = [value for delta in deltas for value in delta.logprobs]
    return ids, logprobs, deltas[-1].finish_reason


def allowed(mask):
    return {i for i in range(32 * len(mask)) if mask[i // 32] >> (i % 32) & 1}


def test_only_what_can_go_on_is_allowed_and_a_stop_token_only_at_an_end(tokenizer, compiler):
    matcher = compiler.start('start: "a" | "ab"')
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    assert allowed(matcher.mask()) >= set(a)
    assert STOP not in allowed(matcher.mask())
    assert all(tokenizer.decode([i]) in ("a", "ab") for i in allowed(matcher.mask()))
    matcher.advance(a[0])
    assert allowed(matcher.mask()) == {STOP, *b}
    matcher.advance(b[0])
    assert allowed(matcher.mask()) == {STOP}
    matcher.advance(STOP)
    with pytest.raises(GrammarError):
        matcher.advance(STOP)


def test_padding_of_the_embedding_is_never_allowed(tokenizer, compiler):
    assert max(allowed(compiler.start("start: /(?s:.*)/").mask())) < len(tokenizer) < VOCAB


@pytest.mark.parametrize("grammar", ["start: /(/", "start: other", '%json {"type": 3}', ""])
def test_a_grammar_with_an_error_is_refused_in_one_line(compiler, grammar):
    with pytest.raises(GrammarError) as refused:
        compiler.start(grammar)
    assert "\n" not in str(refused.value)
    assert str(refused.value)


def test_a_token_that_does_not_match_is_refused(tokenizer, compiler):
    with pytest.raises(GrammarError, match="does not match"):
        list(compiler.masks(TWO_DIGITS, tokenizer.encode("1x")))


async def test_random_weights_write_valid_json_at_any_temperature(tokenizer, compiler, model):
    async with serving(model, compiler) as engine:
        runs = [sample(engine, PERSON, seed=seed, temperature=0.5 + seed % 3) for seed in range(24)]
        for ids, _, finish in await asyncio.gather(*runs):
            assert finish == "stop"
            assert ids[-1] == STOP
            assert 0 <= json.loads(tokenizer.decode(ids[:-1]))["age"] <= 130


async def test_greedy_and_nucleus_sampling_keep_to_the_grammar(tokenizer, compiler, model):
    async with serving(model, compiler) as engine:
        for heat, top_p in ((0.0, 1.0), (1.0, 0.05)):
            ids, _, _ = await sample(engine, TWO_DIGITS, temperature=heat, top_p=top_p)
            assert tokenizer.decode(ids[:-1]).isdigit()


async def test_a_neighbour_with_a_grammar_changes_nothing_for_the_others(compiler, model):
    async with serving(model, compiler) as engine:
        alone = await sample(engine, "", 7)
        together, *_ = await asyncio.gather(
            sample(engine, "", 7), *(sample(engine, PERSON, seed) for seed in range(5))
        )
    assert together[0] == alone[0]


async def test_only_allowed_tokens_are_reported_as_likely(compiler, model):
    async with serving(model, compiler) as engine:
        request = GenerateRequest(
            id="a", prompt_ids=(5,), max_tokens=9, grammar='start: "ab"', top_logprobs=20
        )
        deltas = [delta async for delta in engine.generate(request)]
    for top in itertools.chain.from_iterable(delta.top for delta in deltas):
        assert 1 <= len(top) < 20
        assert sum(torch.tensor([value for _, value in top]).exp()) == pytest.approx(1, abs=1e-5)


async def test_the_learner_scores_the_tokens_as_they_were_sampled(compiler, model):
    async with serving(model, compiler) as engine:
        wanted = [(PERSON, 1.0), ("", 1.0), (TWO_DIGITS, 0.7), (PERSON, 1.6)]
        got = [
            await sample(engine, grammar, seed=seed, temperature=heat)
            for seed, (grammar, heat) in enumerate(wanted)
        ]
    items = [
        credited(grammar, ids, logprobs, heat, str(place))
        for place, ((grammar, heat), (ids, logprobs, _)) in enumerate(zip(wanted, got, strict=True))
    ]
    for batch in batches(items, max_tokens=64):
        with torch.no_grad():
            scores = score(model, batch, grammars=compiler)
        torch.testing.assert_close(scores.logprobs, batch.logprobs, atol=1e-4, rtol=0)
        assert scores.entropy.isfinite().all()


def test_a_forced_token_has_no_gradient_and_a_free_choice_has(compiler, model, tokenizer):
    brace = tokenizer.encode("1")[0]
    forced, free = credited('start: "1"', [brace], [-0.1]), credited("", [brace], [-0.1])
    gradients = []
    for item in (forced, free):
        model.zero_grad()
        batch = batch_of([item])
        score(model, batch, grammars=compiler, entropy_gradient=True).logprobs.sum().backward()
        gradients.append(max(float(p.grad.abs().max()) for p in model.parameters()))
    assert gradients[0] < 1e-6 < 1e-2 < gradients[1]
    model.zero_grad()


def test_training_with_an_entropy_bonus_under_a_grammar_stays_finite(compiler, tokenizer):
    own = tiny_model(seed=1, vocab_size=VOCAB, num_hidden_layers=1)
    trainer = Learner(
        own,
        objective=Objective(entropy_coefficient=0.01, kl_coefficient=0.01),
        optimiser=OptimiserConfig(learning_rate=1e-2),
        updating=lambda _: nullcontext(),
        grammars=compiler,
    )
    ids = [*tokenizer.encode("42"), STOP]
    first = trainer.learn([credited(TWO_DIGITS, ids, [-2.3] * len(ids))])
    assert first["learn/entropy"] >= 0
    assert all(bool(p.isfinite().all()) for p in own.parameters())


def test_a_learner_without_a_compiler_says_what_is_missing(model):
    batch = batch_of([credited(TWO_DIGITS, [3], [-1.0])])
    with pytest.raises(GrammarError, match="none to compile it"):
        score(model, batch)


async def test_a_grammar_that_leads_nowhere_ends_its_own_request_only(compiler, model):
    nowhere = 'start: "\\u0001\\u0002" MORE\nMORE: /[a-c]/ & /[x-z]/'
    async with serving(model, compiler) as engine:
        with pytest.raises(GrammarError):
            await sample(engine, nowhere)
        assert (await sample(engine, TWO_DIGITS))[2] == "stop"


async def test_an_engine_without_a_compiler_refuses_grammars(model):
    engine = LocalEngine(model, name="m", max_context=256)
    try:
        with pytest.raises(GrammarError, match="freely only"):
            await sample(engine, TWO_DIGITS)
    finally:
        await engine.close()


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet='0123456789abc{}": ', min_size=1, max_size=12))
def test_exactly_the_text_of_the_grammar_passes(text):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BASE)
    compiler = GrammarCompiler(tokenizer, VOCAB, frozenset({STOP}))
    grammar = f"start: {json.dumps(text)}"
    ids = [*tokenizer.encode(text, add_special_tokens=False), STOP]
    assert len(list(compiler.masks(grammar, ids))) == len(ids)
    with pytest.raises(GrammarError):
        list(compiler.masks(grammar, [*ids[:-1], ids[0], STOP]))


def credited(grammar, ids, logprobs, temperature=1.0, rollout="r"):
    return Credited(
        advantage=1.0,
        transition=Transition(
            rollout_id=rollout,
            call_id=rollout,
            agent="a",
            prompt_ids=(5, 6, 7),
            completion_ids=tuple(ids),
            logprobs=tuple(logprobs),
            temperature=temperature,
            version=0,
            grammar=grammar,
        ),
    )


def test_a_random_number_that_rounds_up_to_one_takes_the_last_token_that_is_possible():
    logits = torch.tensor([[0.0, 1.0, FORBIDDEN, FORBIDDEN], [0.0, 0.0, 0.0, -50.0]])
    top = torch.tensor([1.0, 0.5])
    for almost in (1.0 - 2.0**-53, 1.0):
        drawn = torch.tensor([almost, almost], dtype=torch.float64)
        choice = choose(logits, torch.ones(2), top, drawn)
        assert choice.ids[0] == 1
        assert choice.ids[1] < 3
        assert choice.logprobs.isfinite().all()


async def test_a_token_against_the_grammar_ends_its_own_request_only(compiler, model, monkeypatch):
    def wrong(self, token):
        raise GrammarError("made up")

    async with serving(model, compiler) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Matcher, "advance", wrong)
            with pytest.raises(GrammarError, match="made up"):
                await sample(engine, TWO_DIGITS)
        assert (await sample(engine, TWO_DIGITS))[2] == "stop"


def test_a_tokenizer_with_more_tokens_than_there_are_logits_is_cut(tokenizer):
    compiler = GrammarCompiler(tokenizer, 440, frozenset({STOP}))
    assert max(allowed(compiler.start("start: /(?s:.*)/").mask())) < 440
