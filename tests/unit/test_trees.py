"""Prefix trees: every position once, and loss and gradient as if each call were trained alone."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from batches import batch_of, batches, credited
from fulmen.engine.pytorch.attention import prepare
from fulmen.learner.attention import FlexTree, TiledTree
from fulmen.learner.blocks import block_mask
from fulmen.learner.chains import chain
from fulmen.learner.layouts import layout_for
from fulmen.learner.logprobs import score
from fulmen.learner.trees import Forest, plant
from fulmen.schema.errors import DataError
from fulmen.schema.records import Credited
from models import small_model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = small_model(Qwen3ForCausalLM, Qwen3Config)
    prepare(model)
    return model


tokens = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple)


@st.composite
def rollouts(draw) -> list[Credited]:
    """Calls over three words, so that they share beginnings, branch and repeat; some go on where
    another ended, some are equal in all but the advantage."""
    items: list[Credited] = []
    for number in range(draw(st.integers(1, 9))):
        before = draw(st.sampled_from(items)).transition if items and draw(st.booleans()) else None
        start = before.prompt_ids + before.completion_ids if before else ()
        items.append(
            credited(
                start[: draw(st.integers(0, len(start)))] + draw(tokens),
                draw(tokens),
                draw(st.floats(-2, 2)),
                rollout=str(number % 3),
                temperature=draw(st.sampled_from((1.0, 0.5))),
                call_id=str(number),
            )
        )
    return items


def loss_and_gradient(
    model, items: Sequence[Credited], **how
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Of the sum of advantage × log π over all tokens, with the log-probabilities of each call."""
    model.zero_grad()
    total, found = 0.0, {}
    for batch in batches(items, **how):
        scores = score(model, batch)
        loss = (batch.advantages * scores.logprobs).sum()
        loss.backward()
        total += loss.item()
        for index, item in enumerate(batch.items):
            found[item.transition.call_id] = scores.logprobs.detach()[batch.calls == index]
    return total, torch.cat([p.grad.flatten() for p in model.parameters()]), found


def alone(model, items: Sequence[Credited]) -> tuple[float, torch.Tensor]:
    """The same, each call by itself through the model's own attention."""
    model.zero_grad()
    total = 0.0
    for item in items:
        prompt, completion = item.transition.prompt_ids, item.transition.completion_ids
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
        table = torch.log_softmax(logits / item.transition.temperature, -1)
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
        loss = item.advantage * table[rows, torch.tensor(completion)].sum()
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_same(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-5) -> None:
    scale = max(float(other.norm()), 1e-3)
    assert float((one - other).norm()) <= tolerance * scale


@settings(max_examples=30, deadline=None)
@given(rollouts(), st.sampled_from([1, 7, 20, 1000]))
def test_loss_and_gradient_of_a_tree_are_those_of_its_calls_trained_alone(model, items, bound):
    want, gradient = alone(model, items)
    got, own, _ = loss_and_gradient(model, items, max_tokens=bound)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert_same(own, gradient)


@settings(max_examples=30, deadline=None)
@given(rollouts(), st.sampled_from([1, 20, 1000]))
def test_chains_give_the_same_numbers(model, items, bound):
    want, gradient = alone(model, items)
    got, own, _ = loss_and_gradient(model, items, layout="chain", max_tokens=bound)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert_same(own, gradient)


@given(rollouts())
def test_a_tree_has_every_distinct_beginning_once(items):
    (forest,) = plant(items, 10_000)
    sequences = [c.transition.prompt_ids + c.transition.completion_ids[:-1] for c in items]
    distinct = {s[: n + 1] for s in sequences for n in range(len(s))}
    assert len(forest.ids) == len(distinct)
    found = {
        tuple(forest.ids[path[: depth + 1]])
        for segment, path in zip(forest.segments, forest.paths(), strict=True)
        for depth in range(len(path) - (segment.end - segment.start), len(path))
    }
    assert found == distinct


@given(rollouts(), st.integers(1, 40))
def test_forests_stay_within_the_bound_and_keep_every_call_whole(items, bound):
    forests = plant(items, bound)
    lessons = [lesson for forest in forests for lesson in forest.lessons]
    assert sorted(id(lesson.item) for lesson in lessons) == sorted(map(id, items))
    for forest in forests:
        assert len(forest.ids) <= bound or len({sequence(one.item) for one in forest.lessons}) == 1
        for lesson in forest.lessons:
            assert [*forest.ids[lesson.before[1:]]] == [*lesson.item.transition.completion_ids[:-1]]
            assert forest.depths[lesson.before[0]] == len(lesson.item.transition.prompt_ids) - 1


def sequence(item: Credited) -> tuple[int, ...]:
    return item.transition.prompt_ids + item.transition.completion_ids[:-1]


@given(rollouts())
def test_a_position_sees_its_ancestors_whichever_way_they_are_written_down(items):
    (forest,) = plant(items, 10_000)
    ends = forest.subtree_ends()
    for segment, path in zip(forest.segments, forest.paths(), strict=True):
        for query in range(segment.start, segment.end):
            above = [key for key in path if key <= query]
            by_run = [key for key in range(query + 1) if query < ends[key]]
            assert by_run == above


def test_a_tree_that_is_too_large_repeats_only_the_path_to_the_cut():
    items = [credited((1,) * 50 + (number,), (5,), call_id=str(number)) for number in range(2, 12)]
    forests = plant(items, 56)
    assert [len(forest.ids) for forest in forests] == [56, 54]
    assert sum(len(f.ids) for f in plant(items, 10_000)) == 60


def test_calls_that_continue_each_other_are_one_chain_and_branches_are_others():
    first = credited((1, 2, 3), (4, 5))
    second = credited((1, 2, 3, 4, 5, 6, 7), (8, 9, 10))
    branch = credited((1, 2, 3, 4, 5, 11), (12,))
    (batch,) = chain([first, second, branch], 1000)
    assert batch.ids.tolist() == [
        [1, 2, 3, 4, 5, 11, 0, 0, 0],
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 64))
def test_chains_stay_within_the_bound_padding_included_or_are_alone(lengths, bound):
    items = [credited((number,) + (1,) * n, (5,)) for number, n in enumerate(lengths)]
    found = chain(items, bound)
    assert sum(len(one.ids) for one in found) == len(items)
    assert all(one.ids.size <= bound or len(one.ids) == 1 for one in found)


def test_what_two_calls_share_is_projected_onto_the_vocabulary_once(model):
    items = [credited((1, 2), (3, 4), a, call_id=str(a)) for a in (1.0, -1.0, 0.5)]
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda _module, inputs, _output: seen.append(len(inputs[0]))
    )
    score(model, batch_of(items))
    handle.remove()
    assert seen == [2]


def test_the_same_tokens_at_two_temperatures_keep_their_own_probabilities(model):
    items = [credited((1, 2), (3,), temperature=t, call_id=str(t)) for t in (1.0, 0.25)]
    _, _, found = loss_and_gradient(model, items)
    assert found["1.0"].item() != pytest.approx(found["0.25"].item())


def test_an_empty_prompt_is_refused_and_an_empty_completion_is_no_lesson():
    with pytest.raises(DataError, match="call c7 has an empty prompt"):
        plant([credited((), (1,), call_id="c7")], 100)
    assert plant([credited((1, 2), ())], 100) == []


LONG = [
    credited((1, 2) * 9, (3, 4, 5), 1.0, call_id="a"),
    credited((1, 2) * 9 + (3, 4, 5, 6), (7, 8), -1.0, call_id="b"),
    credited((1, 2) * 9 + (9, 9) * 70, (10, 11), 0.5, call_id="c"),
]


@pytest.mark.parametrize(
    ("kind", "config", "changes"),
    [
        (Qwen2ForCausalLM, Qwen2Config, {}),
        (Qwen3ForCausalLM, Qwen3Config, {}),
        (LlamaForCausalLM, LlamaConfig, {}),
        (GemmaForCausalLM, GemmaConfig, {}),
        (MistralForCausalLM, MistralConfig, {"sliding_window": 11}),
        (
            Qwen2ForCausalLM,
            Qwen2Config,
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        ),
        (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        ),
    ],
    ids=["qwen2", "qwen3", "llama", "gemma", "mistral", "qwen2-window", "mixtral", "qwen3-moe"],
)
def test_families_are_trained_on_trees_sliding_windows_and_experts_included(kind, config, changes):
    model = small_model(kind, config, **changes)
    want, gradient = alone(model, LONG)
    assert layout_for(model) == ("auto", "")
    got, own, _ = loss_and_gradient(model, LONG)
    assert got == pytest.approx(want, rel=1e-5)
    assert_same(own, gradient)


def test_trees_are_taken_where_they_pay_and_rows_where_nothing_is_shared():
    shared = [credited((1,) * 30 + (n,), (2, 3), call_id=str(n)) for n in range(2, 6)]
    apart = [credited((n,) * 30, (2, 3), call_id=str(n)) for n in range(2, 6)]
    assert batch_of(shared, layout="auto").attention is not None
    assert batch_of(apart, layout="auto").attention is None


def hidden_attention(way, forest: Forest, window: int | None, *, gradients: bool):
    """Output, and gradients, of attention over a forest, from the same random numbers."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, len(forest.ids), 16), (1, 2, len(forest.ids), 16), (1, 2, len(forest.ids), 16))
    inputs = [torch.randn(s, generator=generator).requires_grad_(gradients) for s in shapes]
    output = way(forest, torch.device("cpu"))(*inputs, scaling=0.25, sliding_window=window)
    if gradients:
        (output * torch.randn(output.shape, generator=generator)).sum().backward()
    return [output.detach(), *(i.grad for i in inputs if gradients)]


def who_sees_whom(forest: Forest, window: int | None) -> torch.Tensor:
    """(T, T) bool, written down pair by pair."""
    seen = torch.zeros(len(forest.ids), len(forest.ids), dtype=torch.bool)
    for segment, path in zip(forest.segments, forest.paths(), strict=True):
        for row, key in itertools.product(range(segment.start, segment.end), path):
            near = window is None or forest.depths[row] - forest.depths[key] < window
            seen[row, key] = bool(key <= row and near)
    return seen


def by_dense_mask(forest: Forest, device: torch.device):
    """The plainest way: all T × T scores, and a mask."""

    def attend(query, key, value, *, scaling, sliding_window):
        seen = who_sees_whom(forest, sliding_window)
        keys, values = (x.repeat_interleave(2, dim=1) for x in (key, value))
        scores = (query @ keys.transpose(2, 3) * scaling).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ values).transpose(1, 2)

    return attend


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("way", "gradients"), [(TiledTree, True), (FlexTree, False)])
def test_tiles_and_flex_attention_equal_a_dense_mask(way, gradients, window):
    """FlexAttention has no backward pass on a CPU; there, its output is compared."""
    (forest,) = plant([*LONG, credited((5,) * 200, (1, 2), call_id="d")], 10_000)
    got, want = (
        hidden_attention(w, forest, window, gradients=gradients) for w in (way, by_dense_mask)
    )
    assert len(got) == (4 if gradients else 1)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(rollouts(), st.sampled_from([None, 1, 2, 5]), st.sampled_from([2, 3, 8]))
def test_blocks_are_those_that_pytorch_finds_by_writing_all_pairs_down(items, window, size):
    (forest,) = plant(items, 10_000)
    mask, count = block_mask(forest, window, torch.device("cpu"), size=size), len(forest.ids)
    assert mask.mask_mod is not None
    dense = create_mask(mask.mask_mod, 1, 1, count, count, "cpu")
    assert torch.equal(dense[0, 0], who_sees_whom(forest, window))
    want = create_block_mask(mask.mask_mod, 1, 1, count, count, "cpu", BLOCK_SIZE=size)
    assert mask.seq_lengths == want.seq_lengths
    assert mask.BLOCK_SIZE == want.BLOCK_SIZE
    assert torch.equal(mask.to_dense(), want.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        for part in (f"{name}_num_blocks", f"{name}_indices"):
            assert torch.equal(getattr(mask, part), getattr(want, part)), part


def test_a_long_forest_has_blocks_without_all_its_pairs():
    """120,000 positions have 14,400,000,000 pairs."""
    (forest,) = plant([credited((1,) * 120_000, (2,))], 200_000)
    mask = block_mask(forest, 1000, torch.device("cpu"))
    assert mask.full_kv_num_blocks is not None
    assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() < 938 * 9


def kept_bytes(model, items: Sequence[Credited]) -> int:
    """Memory that a forward pass keeps for its backward pass, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        score(model, batch_of(items)).logprobs.sum()
    return sum(storage.nbytes() for storage in kept.values())


def test_memory_grows_with_distinct_positions_and_not_with_calls(model):
    """Four rollouts of ten calls after a long prompt, beside one sequence as long as their tree."""
    prompt, calls = (1, 2) * 60, []
    for rollout in range(4):
        context = (*prompt, 3 + rollout)
        for turn in range(10):
            calls.append(credited(context, (7,) * 4, rollout=str(rollout), call_id=f"{turn}"))
            context = (*context, *(7,) * 4, 8)
    (forest,) = plant(calls, 10_000)
    repeated = sum(len(sequence(call)) for call in calls)
    assert repeated > 15 * len(forest.ids)
    one = credited((5,) * (len(forest.ids) - 159), (7,) * 160)
    assert kept_bytes(model, calls) < 1.15 * kept_bytes(model, [one])
