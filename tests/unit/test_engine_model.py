"""Loading a model folder, and preparing a process, in processes that have not loaded torch."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from fulmen.engine.model import load_model
from fulmen.schema.errors import ModelError


@pytest.fixture
def folder(tmp_path):
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=77,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "m")
    words = Tokenizer(models.WordLevel({"<u>": 0, "hi": 1}, unk_token="<u>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<u>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_a_complete_folder_is_loaded_for_inference(folder):
    loaded = load_model(folder, dtype="bfloat16")
    assert (loaded.name, loaded.max_context) == ("m", 77)
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.tokenizer("hi").input_ids == [1]


def damage(folder, what) -> None:
    if what == "template":
        (folder / "chat_template.jinja").unlink()
    elif what == "tokenizer":
        for path in folder.glob("*token*"):
            path.unlink()
    elif what == "config":
        (folder / "config.json").unlink()
    else:
        (folder / "model.safetensors").write_bytes(b"\x00" * 64)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("template", "no chat template"),
        ("tokenizer", "no tokenizer"),
        ("config", "no config.json"),
        ("weights", "weights of model .* cannot be loaded"),
    ],
)
def test_what_a_folder_lacks_is_named(folder, what, message):
    damage(folder, what)
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_path_that_does_not_exist_is_not_looked_up_in_the_hub(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_model(tmp_path / "nowhere")


def prepared(code: str) -> dict[str, Any]:
    """What a fresh process prints."""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(out.stdout)


def test_preparing_twice_is_preparing_once_and_loads_no_torch():
    got = prepared(
        "import json, sys, os\n"
        "os.environ.pop('OMP_WAIT_POLICY', None)\n"
        "from fulmen.engine.platform import prepare_process\n"
        "same = prepare_process(threads=1) == prepare_process(threads=1)\n"
        "print(json.dumps({'same': same, 'torch': 'torch' in sys.modules,\n"
        "    'policy': os.environ['OMP_WAIT_POLICY']}))"
    )
    assert got == {"same": True, "torch": False, "policy": "PASSIVE"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_stays_with_the_process():
    got = prepared(
        "import json, psutil\n"
        "from fulmen.engine.platform import prepare_process\n"
        "malloc = prepare_process(threads=1).malloc\n"
        "block = bytearray(64 << 20)\n"
        "del block\n"
        "print(json.dumps({'malloc': malloc, 'mb': psutil.Process().memory_info().rss >> 20}))"
    )
    assert got["malloc"]
    assert got["mb"] >= 64
