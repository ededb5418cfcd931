"""LoRA adapters inside a model: what they change, what they leave, how they are kept."""

import copy
import threading

import pytest
import torch
from torch import Tensor
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fulmen.engine.adapted import chosen
from fulmen.engine.adapters import (
    AdapterConfig,
    add_adapter,
    has_adapter,
    load_adapter,
    merged_weights,
    save_adapter,
)
from fulmen.engine.base import GenerateRequest
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.schema.errors import ConfigError, ModelError

IDS = torch.arange(1, 13).view(2, 6)


def plain(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def adapted(**changes: object) -> PreTrainedModel:
    model = plain()
    add_adapter(model, AdapterConfig(**{"rank": 2, "alpha": 4} | changes))  # type: ignore[arg-type]
    return model


def stir(model: PreTrainedModel) -> None:
    """As training would: the adapter says something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS).logits


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained():
    model = adapted()
    torch.testing.assert_close(logits(model), logits(plain()))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2, "two matrices beside each of seven linear layers of two"
    assert all("lora_" in name for name in trained)
    assert not any(module.training for module in model.modules())


def test_targets_choose_the_layers():
    model = adapted(targets=("q_proj", "v_proj"))
    trained = {n.split(".")[4] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}


def test_a_target_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ConfigError) as error:
        adapted(targets=("query",))
    assert "no layer query" in str(error.value)
    assert "q_proj" in str(error.value)


def test_the_same_seed_makes_the_same_adapter_and_leaves_other_random_numbers_alone():
    one, two, other = adapted(seed=1), adapted(seed=1), adapted(seed=2)
    name = "model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(one.get_parameter(name), two.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
    model = plain()
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    add_adapter(model, AdapterConfig(rank=2, alpha=4))
    assert torch.equal(torch.rand(1), want)


def test_without_it_the_model_is_as_it_was_in_this_thread_only():
    model = adapted()
    stir(model)
    found = {}
    with chosen(None):
        thread = threading.Thread(target=lambda: found.update(there=logits(model)))
        thread.start()
        thread.join()
        found["here"] = logits(model)
    torch.testing.assert_close(found["here"], logits(plain()))
    torch.testing.assert_close(found["there"], logits(model))
    assert (logits(model) - logits(plain())).abs().max() > 0.01


def test_merged_weights_make_a_plain_model_of_equal_logits():
    model, target = adapted(), plain(seed=9)
    stir(model)
    done = target.load_state_dict(merged_weights(model), strict=False)
    assert done.missing_keys == ["lm_head.weight"], "tied to the embedding"
    assert not done.unexpected_keys
    torch.testing.assert_close(logits(target), logits(model), rtol=1e-5, atol=1e-5)


def test_an_adapter_is_the_same_after_saving_and_loading(tmp_path):
    model, twin = adapted(), adapted(seed=8)
    stir(model)
    save_adapter(model, tmp_path)
    load_adapter(twin, tmp_path)
    assert torch.equal(logits(twin), logits(model))


def test_an_adapter_of_another_shape_or_none_is_refused(tmp_path):
    save_adapter(adapted(), tmp_path)
    with pytest.raises(ModelError, match="another shape"):
        load_adapter(adapted(rank=3), tmp_path)
    with pytest.raises(ModelError, match="other layers"):
        load_adapter(adapted(targets=("q_proj",)), tmp_path)
    with pytest.raises(ModelError, match="holds no adapter"):
        load_adapter(adapted(), tmp_path / "elsewhere")


def test_a_copy_has_an_adapter_of_its_own():
    model = adapted()
    stir(model)
    twin = copy.deepcopy(model)
    want = logits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(twin), want)
    assert has_adapter(twin)
    assert not has_adapter(plain())


def windowed() -> PreTrainedModel:
    """Of a family that is served by its own modules."""
    config = MistralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
    )
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("make", [plain, windowed])
async def test_the_engine_samples_with_the_adapter_as_it_is_after_an_update(make):
    model = make()
    add_adapter(model, AdapterConfig(rank=2, alpha=4))
    engine = LocalEngine(model, name="m", max_context=64)
    with engine.updating(1):
        stir(model)
    request = GenerateRequest(id="r", prompt_ids=(1, 2, 3, 4, 5, 6), max_tokens=9, seed=0)
    ids, logprobs = list(request.prompt_ids), []
    with chosen(None):  # of this thread; the engine has its own
        async for delta in engine.generate(request):
            ids += delta.token_ids
            logprobs += delta.logprobs
    await engine.close()
    with torch.no_grad():
        table = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    want = table[torch.arange(5, 14), torch.tensor(ids[6:])]
    torch.testing.assert_close(torch.tensor(logprobs), want, rtol=1e-4, atol=1e-5)
