"""LoRA: a few weights that are trained in the place of many, in a model that stays as it is.

Beside each chosen layer W stand two thin matrices, and x ↦ W x + (alpha / rank) · B A x; B begins
at zero, so training begins at the model as it was. The layers are PEFT's, inside the model that
learner and engine share, so what samples is what is trained.

Source: LoRA, arXiv 2106.09685.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fulmen.schema.errors import ConfigError, ModelError

FOLDER = "adapter"
"""Where a checkpoint holds the adapter, in PEFT's format."""
_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Size and place of an adapter."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()
    """Names of layers, as in `q_proj`; empty: all linear ones but the output embedding."""
    seed: int = 0


def add_adapter(model: PreTrainedModel, config: AdapterConfig) -> None:
    """Put an adapter into a model and freeze everything else. The output stays as it is.

    Raises:
        ConfigError: PEFT is not installed, or no layer has a name of `targets`.
    """
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise ConfigError(
            "lora_rank needs the package peft", hint='pip install "fulmen[lora]"'
        ) from error
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType] - any number will do
        target_modules=list(config.targets) or "all-linear",
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model.add_adapter(lora, _NAME)
        except ValueError as error:
            linear = {name for name, module in named_linears(model)}
            raise ConfigError(
                f"lora_targets: the model has no layer {' or '.join(config.targets)}",
                hint="it has " + ", ".join(sorted(linear)),
            ) from error
    model.eval()
    # Whoever loads the adapter finds the model from wherever that is done.
    home = model.name_or_path
    if home and (Path(home) / "config.json").is_file():
        model.peft_config[_NAME].base_model_name_or_path = str(Path(home).absolute())
    for layer in adapted_layers(model):
        # Partials of bound methods, not closures: a deep copy of the model gets its own.
        layer.forward = functools.partial(_switched, layer.forward, layer)


def named_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers with the last part of their names."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path.rpartition(".")[2], module


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether `add_adapter` was called."""
    return any(True for _ in adapted_layers(model))


def adapted_layers(model: nn.Module) -> Iterator[Any]:
    """PEFT's layers in a model."""
    for module in model.modules():
        if is_adapted(module):
            yield module


def is_adapted(layer: nn.Module) -> bool:
    """Whether a layer is one of PEFT's around another."""
    return hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer")


@contextmanager
def without_adapter() -> Iterator[None]:
    """Forward passes of this thread are those of the model without its adapter; other threads, the
    engine's among them, go on with it."""
    _thread.plain = True
    try:
        yield
    finally:
        _thread.plain = False


def _switched(adapted: Callable[..., Tensor], layer: Any, *inputs: Any, **options: Any) -> Tensor:  # noqa: ANN401
    if getattr(_thread, "plain", False):
        return layer.base_layer(*inputs, **options)
    return adapted(*inputs, **options)


@torch.no_grad()
def merged_weight(layer: nn.Module) -> Tensor:
    """The weight of a linear layer with its adapter added, if it has one, without gradient."""
    if not is_adapted(layer):
        assert isinstance(layer.weight, Tensor)
        return layer.weight.detach()
    found: Any = layer
    base = found.base_layer.weight
    return (base.float() + found.get_delta_weight(_NAME).float()).to(base.dtype)


def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """All weights by the names they have in a model without adapter."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if is_adapted(module):
            found[f"{path}.weight"] = merged_weight(module)
            base: Any = module
            if base.base_layer.bias is not None:
                found[f"{path}.bias"] = base.base_layer.bias.detach()
    for name, parameter in model.named_parameters():
        if ".base_layer." not in name and ".lora_" not in name:
            found[name] = parameter.detach()
    return found


def write_model(like: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model of such a kind, with these weights, in Hugging Face's format."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(like.config, dtype=like.dtype)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, p in model.named_parameters() if p.is_meta]
    assert not missing, f"weights that nobody gave: {missing[:3]}"
    model.generation_config = like.generation_config
    model.save_pretrained(folder)


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter in PEFT's format, for a model of any wrapping."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # Transformers' own way would ask the Hub whether the vocabulary is the base's; it is.
    weights = get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    prefixed = {f"base_model.model.{name}": w.contiguous() for name, w in weights.items()}
    save_file(prefixed, target / _WEIGHTS, metadata={"format": "pt"})
    config: Any = model.peft_config[_NAME]
    config.save_pretrained(target)


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Take the weights of the model's adapter from a checkpoint.

    Raises:
        ModelError: there is none, or it is of another shape.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    file = folder / FOLDER / _WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} holds no adapter", hint="was the run begun without lora_rank?")
    weights: Mapping[str, Tensor] = load_file(file)
    try:
        done = set_peft_model_state_dict(model, dict(weights), adapter_name=_NAME)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ModelError(f"{file} is the adapter of another shape ({reason})") from error
    if done.unexpected_keys or any(".lora_" in name for name in done.missing_keys):
        raise ModelError(f"{file} is an adapter of other layers")
