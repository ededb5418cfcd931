"""LoRA: a few weights that are trained in the place of many, in a model that stays as it is.

Beside each chosen layer W stand two thin matrices, and x ↦ W x + (alpha / rank) · B A x; B begins
at zero, so training begins at the model as it was. The layers are PEFT's, inside the model that
learner and engine share, so what samples is what is trained. Several adapters in one model are
several policies over one base; forward passes choose theirs (`adapted.py`).

Source: LoRA, arXiv 2106.09685.
"""

import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fulmen.engine.adapted import adapted_forward, is_adapted
from fulmen.schema.errors import ConfigError, ModelError

FOLDER = "adapter"
"""Where a checkpoint holds the adapter, in PEFT's format."""
DEFAULT = "default"
"""The name of an adapter, if nothing else is said; and in files, of any."""
_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Size and place of an adapter."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()
    """Names of layers, as in `q_proj`; empty: all linear ones but the output embedding."""
    seed: int = 0


def add_adapter(model: PreTrainedModel, config: AdapterConfig, name: str = DEFAULT) -> None:
    """Put an adapter into a model and freeze everything but adapters. What the model computes
    without it, or with others, stays as it is.

    Raises:
        ConfigError: PEFT is not installed, no layer has a name of `targets`, or one that has is
            not linear, or with other adapters, an expert.
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
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in config.targets:
            raise ConfigError(f"lora_targets: {path} is an embedding, no linear layer")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        torch.manual_seed(config.seed)
        try:
            model.add_adapter(lora, name)
        except ValueError as error:
            linear = {name for name, module in named_linears(model)}
            raise ConfigError(
                f"lora_targets: the model has no layer {' or '.join(config.targets)}",
                hint="it has " + ", ".join(sorted(linear)),
            ) from error
    model.eval()
    if len(adapter_names(model)) > 1 and any(".experts." in path for path in _adapted(model)):
        # Experts are given tokens that have lost their rows.
        raise ConfigError(
            "policies cannot share a model in which experts have adapters",
            hint="name other layers in lora_targets",
        )
    # Whoever loads the adapter finds the model from wherever that is done.
    home = model.name_or_path
    if home and (Path(home) / "config.json").is_file():
        model.peft_config[name].base_model_name_or_path = str(Path(home).absolute())
    for layer in adapted_layers(model):
        # A partial, not a closure: a deep copy of the model gets its own.
        layer.forward = functools.partial(adapted_forward, layer)
    for path, parameter in model.named_parameters():
        # PEFT leaves only one of several to be trained.
        parameter.requires_grad_(".lora_" in path)


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
    return iter(_adapted(model).values())


def _adapted(model: nn.Module) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if is_adapted(module)}


def adapter_names(model: nn.Module) -> list[str]:
    """The adapters of a model, in the order they were put into it."""
    first = next(adapted_layers(model), None)
    return [] if first is None else list(first.lora_A)


def adapter_parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """What is trained of an adapter, by the names that it has in a model with no other."""
    return {
        path.replace(f".{name}.", f".{DEFAULT}."): parameter
        for path, parameter in model.named_parameters()
        if ".lora_" in path and path.endswith(f".{name}.weight")
    }


@torch.no_grad()
def merged_weight(layer: nn.Module, name: str | None = DEFAULT) -> Tensor:
    """The weight of a linear layer, with an adapter added if it has one and None is not asked for,
    without gradient."""
    found: Any = layer
    if not is_adapted(layer):
        return found.weight.detach()
    base = found.base_layer.weight.detach()
    if name is None:
        return base
    return (base.float() + found.get_delta_weight(name).float()).to(base.dtype)


def merged_weights(model: PreTrainedModel, name: str = DEFAULT) -> dict[str, Tensor]:
    """All weights, an adapter added, by the names they have in a model without one."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if is_adapted(module):
            found[f"{path}.weight"] = merged_weight(module, name)
            base: Any = module
            if base.base_layer.bias is not None:
                found[f"{path}.bias"] = base.base_layer.bias.detach()
    for path, parameter in model.named_parameters():
        if ".base_layer." not in path and ".lora_" not in path:
            found[path] = parameter.detach()
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


def save_adapter(model: PreTrainedModel, folder: Path, name: str = DEFAULT) -> None:
    """Write an adapter in PEFT's format, for a model of any wrapping."""
    from safetensors.torch import save_file

    # PEFT's own way would ask the Hub whether the vocabulary is the base's; it is.
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    weights = {path: w.detach().contiguous() for path, w in _in_file(model, name).items()}
    save_file(weights, target / _WEIGHTS, metadata={"format": "pt"})
    config: Any = model.peft_config[name]
    config.save_pretrained(target)


@torch.no_grad()
def load_adapter(model: PreTrainedModel, folder: Path, name: str = DEFAULT) -> None:
    """Take the weights of an adapter in the model from a checkpoint.

    Raises:
        ModelError: there is none, or it is of another shape.
    """
    from safetensors.torch import load_file

    file = folder / FOLDER / _WEIGHTS
    if not file.is_file():
        raise ModelError(f"{folder} holds no adapter", hint="was the run begun without lora_rank?")
    saved: Mapping[str, Tensor] = load_file(file)
    wanted = _in_file(model, name)
    if saved.keys() != wanted.keys():
        raise ModelError(f"{file} is an adapter of other layers")
    for path, parameter in wanted.items():
        here, there = list(parameter.shape), list(saved[path].shape)
        if here != there:
            raise ModelError(
                f"{file} is the adapter of another shape: {path} is {here} here and {there} there"
            )
        parameter.copy_(saved[path])


def _in_file(model: PreTrainedModel, name: str) -> dict[str, nn.Parameter]:
    """An adapter's weights by their names in PEFT's files, which do not say the adapter's."""
    return {
        "base_model.model." + path.replace(f".{DEFAULT}.", "."): parameter
        for path, parameter in adapter_parameters(model, name).items()
    }
