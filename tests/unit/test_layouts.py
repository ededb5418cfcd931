"""Every family is trained as it computes by itself: over trees, over chains, or not at all."""

import copy

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from batches import batches, credited
from fulmen.engine.pytorch.attention import prepare
from fulmen.learner.attention import TiledTree
from fulmen.learner.layouts import layout_for
from fulmen.learner.logprobs import score
from fulmen.schema.errors import ModelError
from models import small_model

WINDOW = {"sliding_window": 5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = (GptOssForCausalLM, GptOssConfig, {**EXPERTS, **WINDOW, "head_dim": 16})
PHIMOE = (PhimoeForCausalLM, PhimoeConfig, {**EXPERTS, **WINDOW, "head_dim": 4})
QWEN2_MOE = (
    Qwen2MoeForCausalLM,
    Qwen2MoeConfig,
    {
        **WINDOW,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "head_dim": 4,
    },
)
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral-window": (MistralForCausalLM, MistralConfig, WINDOW),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "gemma2-window-and-caps": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {**WINDOW, "attn_logit_softcapping": 0.1, "final_logit_softcapping": 2.0},
    ),
    "gpt-oss-window-and-sinks": GPT_OSS,
    "phimoe-window": PHIMOE,
    "qwen2-moe-window": QWEN2_MOE,
    "granite-scaled-logits": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 4.0}),
}

CALLS = [
    credited((1, 2, 3) * 6, (4, 5, 6), call_id="a"),
    credited((1, 2, 3) * 6 + (4, 5, 6, 7), (8, 9), call_id="b", temperature=0.5),
    credited((7,) * 9 + (2, 4) * 5, (10, 11, 1), call_id="c"),
]


def strong(model: PreTrainedModel) -> PreTrainedModel:
    """With weights large enough for attention, caps and sinks to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def eager(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Log-probabilities of CALLS, one after the other, by Hugging Face's written-out attention."""
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    found = {}
    for item in CALLS:
        prompt, completion = item.transition.prompt_ids, item.transition.completion_ids
        logits = own(input_ids=torch.tensor([prompt + completion])).logits[0]
        table = torch.log_softmax(logits / item.transition.temperature, -1)
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
        found[item.transition.call_id] = table[rows, torch.tensor(completion)]
    return found


@torch.no_grad()
def scored(model: PreTrainedModel, layout) -> dict[str, torch.Tensor]:
    return {
        item.transition.call_id: scores[batch.calls == place]
        for batch in batches(CALLS, layout=layout)
        for scores in [score(model, batch).logprobs]
        for place, item in enumerate(batch.items)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_on_its_own_log_probabilities(family):
    kind, config, changes = FAMILIES[family]
    model = strong(small_model(kind, config, **changes))
    want = eager(model)
    layout, _ = layout_for(model)
    torch.testing.assert_close(scored(model, "chain"), want, rtol=0, atol=1e-4)
    if layout != "chain":
        torch.testing.assert_close(scored(model, "tree"), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        (GPT_OSS, "gpt_oss is trained on plain sequences: the model's attention wants 's_aux'"),
        (FAMILIES["gemma2-window-and-caps"], "the model's attention wants 'softcap'"),
    ],
    ids=["sinks", "caps"],
)
def test_what_a_tree_cannot_have_is_said_in_words_and_trained_on_chains(family, why):
    kind, config, changes = family
    layout, reason = layout_for(small_model(kind, config, **changes))
    assert layout == "chain"
    assert reason.endswith(why)


@pytest.mark.parametrize("family", [PHIMOE, QWEN2_MOE], ids=["of-all-layers", "of-some"])
def test_a_window_that_layers_keep_to_themselves_is_found_out_however_long_it_is(family):
    kind, config, changes = family
    model = small_model(kind, config, **{**changes, "sliding_window": 300})
    layout, why = layout_for(model)
    assert layout == "chain"
    assert why.endswith("not all of its layers say how far back they look")


def test_a_window_that_layers_tell_of_is_no_hindrance():
    model = small_model(MistralForCausalLM, MistralConfig, sliding_window=300)
    assert layout_for(model) == ("auto", "")


def test_a_family_whose_window_is_not_in_use_has_trees():
    kind, config, changes = QWEN2_MOE
    plain = {**changes, "use_sliding_window": False, "layer_types": None}
    assert layout_for(small_model(kind, config, **plain)) == ("auto", "")


def test_a_family_without_such_attention_is_left_as_it_came():
    model = strong(small_model(MambaForCausalLM, MambaConfig, head_dim=16, state_size=4))
    want, before = eager(model), model.config._attn_implementation
    layout, why = layout_for(model)
    assert (layout, model.config._attn_implementation) == ("chain", before)
    assert "linear_attention layers" in why
    torch.testing.assert_close(scored(model, "chain"), want, rtol=0, atol=1e-4)


def test_a_family_that_would_be_trained_on_other_numbers_than_its_own_is_refused():
    """One that does to its logits what no configuration tells."""

    class Tempered(Qwen3ForCausalLM):
        def forward(self, *arguments, **keywords):
            output = super().forward(*arguments, **keywords)
            assert output.logits is not None
            return type(output)(logits=output.logits / 3)  # type: ignore[arg-type]

    model = strong(small_model(Tempered, Qwen3Config))
    with pytest.raises(
        ModelError, match="'qwen3' cannot be trained: computed here, their log-prob"
    ):
        layout_for(model)


def test_attention_that_is_wrong_over_trees_is_found_out(monkeypatch):
    broken = strong(small_model(Qwen3ForCausalLM, Qwen3Config))
    monkeypatch.setattr(TiledTree, "__call__", lambda _self, query, *_, **__: query.transpose(1, 2))
    layout, why = layout_for(broken)
    assert layout == "chain"
    assert "over a tree its log-probabilities differ by" in why


def test_finding_a_layout_leaves_weights_and_attention_to_the_engine():
    model = small_model(Qwen3ForCausalLM, Qwen3Config)
    prepare(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layout_for(model)
    assert model.config._attn_implementation == "fulmen"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
