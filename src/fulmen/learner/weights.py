"""The weights that a learner trains, as it sees them: whole in one process, or spread over several.

The learner computes, steps, saves and loads through this; that other processes take part, it only
notices in getting fewer micro-batches.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fulmen.engine.adapted import chosen
from fulmen.engine.adapters import (
    DEFAULT,
    adapter_parameters,
    has_adapter,
    merged_weights,
    save_adapter,
    write_model,
)
from fulmen.learner.batch import Layout, MicroBatch
from fulmen.learner.calls import CallNumbers
from fulmen.learner.layouts import layout_for
from fulmen.learner.metrics import Tally
from fulmen.schema.records import Credited

T = TypeVar("T")


class Forward(Protocol):
    """Weights to compute with."""

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:  # noqa: ANN401 - the function's own
        """`function(model, …)` as one forward pass."""
        ...


class Weights(Forward, Protocol):
    """Weights to train."""

    @property
    def model(self) -> PreTrainedModel:
        """What they belong to."""
        ...

    def trained(self) -> dict[str, nn.Parameter]:
        """What of it is trained, by the names that a checkpoint has."""
        ...

    @property
    def device(self) -> torch.device:
        """Where micro-batches are to be."""
        ...

    @property
    def first(self) -> bool:
        """Whether this process writes what is there once."""
        ...

    def layout(self) -> tuple[Layout, str]:
        """How calls are laid out for this model; why, if not as trees."""
        ...

    def frozen(self) -> Forward:
        """The policy as it is now, whatever is learned later: a reference."""
        ...

    def share(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This process's part of some micro-batches."""
        ...

    def total(self, tally: Tally) -> None:
        """Add what other processes have counted."""
        ...

    def collect(self, items: Sequence[Credited], found: CallNumbers) -> CallNumbers:
        """What all processes have found of the same calls."""
        ...

    def publish(self) -> None:
        """Bring the trained weights to where they are sampled from."""
        ...

    def save(self, folder: Path, *, final: bool) -> None:
        """Write the policy; if it is the last time, as a model that anyone can load."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What else a checkpoint must hold, and may: to be saved, or to be loaded in place."""
        ...


class Whole:
    """A model in this process, which the engine samples from as it is."""

    first = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def trained(self) -> dict[str, nn.Parameter]:
        return trainable(self.model)

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:  # noqa: ANN401 - the function's own
        return function(self.model, *arguments, **keywords)

    def layout(self) -> tuple[Layout, str]:
        return layout_for(self.model)

    def frozen(self) -> Forward:
        """With an adapter: the model without it. Else a copy."""
        if has_adapter(self.model):
            return WithoutAdapter(self)
        return Whole(copy.deepcopy(self.model).requires_grad_(False))

    def share(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        return list(batches)

    def total(self, tally: Tally) -> None:
        """There are no others."""

    def collect(self, items: Sequence[Credited], found: CallNumbers) -> CallNumbers:
        """All of them."""
        assert all(id(item) in found for item in items if item.transition.completion_ids)
        return found

    def publish(self) -> None:
        """They are there already."""

    def save(self, folder: Path, *, final: bool) -> None:
        write_policy(self.model, folder, final=final)

    def tensors(self) -> dict[str, Tensor]:
        """Nothing: the policy's own files are exact."""
        return {}


class OneAdapter(Whole):
    """One of several adapters in a model in this process: a policy that shares its base."""

    def __init__(self, model: PreTrainedModel, adapter: str) -> None:
        super().__init__(model)
        self._adapter = adapter

    def trained(self) -> dict[str, nn.Parameter]:
        return adapter_parameters(self.model, self._adapter)

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:  # noqa: ANN401 - the function's own
        with chosen(self._adapter):
            return super().run(function, *arguments, **keywords)

    def layout(self) -> tuple[Layout, str]:
        return self.run(layout_for)

    def frozen(self) -> Forward:
        return WithoutAdapter(Whole(self.model))

    def save(self, folder: Path, *, final: bool) -> None:
        write_policy(self.model, folder, final=final, adapter=self._adapter)


class WithoutAdapter:
    """The model that an adapter was put into, at no cost in memory."""

    def __init__(self, weights: Forward) -> None:
        self._weights = weights

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:  # noqa: ANN401 - the function's own
        with chosen(None):
            return self._weights.run(function, *arguments, **keywords)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters that are to have gradients, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def write_policy(
    model: PreTrainedModel, folder: Path, *, final: bool, adapter: str = DEFAULT
) -> None:
    """Write a model in Hugging Face's format; of one with adapters this one, and if it is the last
    time, the model and it merged."""
    if not has_adapter(model):
        model.save_pretrained(folder)
        return
    save_adapter(model, folder, adapter)
    if final:
        write_model(model, merged_weights(model, adapter), folder)
