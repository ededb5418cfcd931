"""Random models, small enough for any test."""

from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

M = TypeVar("M", bound=PreTrainedModel)

SMALL: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
"""The shape of a model of any family."""

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


def small_model(kind: type[M], config: Any, *, seed: int = 0, **changes: Any) -> M:
    """One of another family; `changes` are of its configuration."""
    torch.manual_seed(seed)
    return kind(config(**(SMALL | changes))).eval()
