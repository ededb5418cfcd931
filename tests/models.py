"""Random Qwen3 models, small enough for any test."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def tiny_model(*, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """The same weights for the same seed and shape; `changes` are of the configuration."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**(TINY | changes))).eval()
