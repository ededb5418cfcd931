"""A model's weights spread over processes: FSDP2, PyTorch's fully sharded data parallelism.

Each process holds a part of every weight, of its gradient and of the optimiser's moments; a layer
is put together for the moment in which it is computed. The first process also has the whole model,
which its engine samples from: weights start there, and `publish` brings them back.
"""

import json
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fulmen.engine.adapters import has_adapter
from fulmen.engine.pytorch.attention import prepare
from fulmen.learner.batch import Layout, MicroBatch
from fulmen.learner.calls import CallNumbers
from fulmen.learner.layouts import layout_for
from fulmen.learner.metrics import Counted, Tally
from fulmen.learner.ranks import Ranks
from fulmen.learner.weights import Forward, WithoutAdapter, trainable, write_policy
from fulmen.schema.codec import from_msgpack, pack_floats, to_msgpack, unpack_floats
from fulmen.schema.records import Credited, Record

T = TypeVar("T")

_ENTRY = "fulmen_run"
"""Name of the method by which forward passes enter a sharded model."""


class Numbers(Record, frozen=True, kw_only=True):
    """What a process has found of the tokens of some calls."""

    of: dict[int, bytes]
    """By the place of the call: float32 numbers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How the parts of a model are kept and computed with."""

    dtype: torch.dtype = torch.float32
    """Layers are computed in; weights, gradients and their sums are float32."""
    offload: bool = False
    """Keep the parts in the CPU's memory, and step there."""
    shape: Callable[[PreTrainedModel], object] = lambda _: None
    """What to do to the empty model before it is cut: adapters, checkpointing of activations."""


class Sharded:
    """The part that one process has; all processes call its methods together."""

    def __init__(
        self,
        ranks: Ranks,
        whole: PreTrainedModel | None,
        config: PretrainedConfig,
        plan: "Plan",
    ) -> None:
        """Take the weights over from the first process.

        Args:
            ranks: the processes.
            whole: the whole model, in the first process; None in the others.
            config: of the model.
            plan: how its parts are kept and computed with.
        """
        self._ranks = ranks
        self.whole = whole
        self._plan = plan
        self.model = _empty(config)
        prepare(self.model)
        plan.shape(self.model)
        policy = MixedPrecisionPolicy(
            param_dtype=None if plan.dtype == torch.float32 else plan.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        offload = plan.offload and ranks.device.type != "cpu"
        options: dict[str, Any] = {
            "mesh": ranks.mesh,
            "mp_policy": policy,
            # The outermost part, too: kept whole after a forward pass without a backward one, it
            # would be the old weights after the next step.
            "reshard_after_forward": True,
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        layers: Any = self.model.get_decoder().layers
        for layer in layers:
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        self.model.to_empty(device="cpu" if offload else ranks.device)
        self.model.tie_weights()
        self._take_over()
        setattr(self.model, _ENTRY, types.MethodType(_run, self.model))
        register_fsdp_forward_method(self.model, _ENTRY)

    @property
    def first(self) -> bool:
        return self._ranks.first

    @property
    def device(self) -> torch.device:
        """Where batches are to be."""
        return self._ranks.device

    def trained(self) -> dict[str, nn.Parameter]:
        return trainable(self.model)

    def run(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:  # noqa: ANN401 - the function's own
        """`function(model, …)` as one forward pass; in every process the same number of times."""
        return getattr(self.model, _ENTRY)(function, *arguments, **keywords)

    def layout(self) -> tuple[Layout, str]:
        """As the first process finds out on the whole model."""
        found = layout_for(self.whole) if self.whole is not None else ("tree", "")
        layout, why = json.loads(self._ranks.broadcast(json.dumps(found).encode()))
        return layout, why

    def frozen(self) -> Forward:
        """With an adapter: the model without it. Else a second one, spread as this is."""
        if has_adapter(self.model):
            return WithoutAdapter(self)
        return Sharded(
            self._ranks, self.whole, self.model.config, replace(self._plan, shape=_freeze)
        )

    def share(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Every process gets as many, because they compute together: where they do not come out
        even, some get one of weight 0. Gradients are averaged over the processes, so weights are
        multiplied by their number.
        """
        size = self._ranks.size
        rounds = -(-len(batches) // size)
        shared: list[MicroBatch] = []
        for index in range(self._ranks.rank, rounds * size, size):
            counts = index < len(batches)
            batch = batches[index if counts else -1]
            weights = batch.weights * (size if counts else 0)
            shared.append(replace(batch, weights=weights, counts=counts))
        return shared

    def total(self, tally: Tally) -> None:
        counted = self._ranks.gather(to_msgpack(tally.counted()))
        for rank, data in enumerate(counted):
            if rank != self._ranks.rank:
                tally.add(from_msgpack(Counted, data))

    def collect(self, items: Sequence[Credited], found: CallNumbers) -> CallNumbers:
        own = {place: found[id(item)] for place, item in enumerate(items) if id(item) in found}
        numbers = Numbers(of={place: pack_floats(own[place].tolist()) for place in own})
        gathered: CallNumbers = {}
        for data in self._ranks.gather(to_msgpack(numbers)):
            for place, values in from_msgpack(Numbers, data).of.items():
                told = torch.tensor(unpack_floats(values), device=self.device)
                gathered[id(items[place])] = told
        return gathered

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the trained weights to the whole model."""
        targets = dict(self.whole.named_parameters()) if self.whole is not None else {}
        for name, parameter in self.trained().items():
            # One at a time: only one weight is whole in every process's memory.
            full = _whole_of(parameter, self.device)
            if self.whole is not None:
                targets[name].copy_(full)

    def save(self, folder: Path, *, final: bool) -> None:
        """From the first process's whole model, in the format that it samples in."""
        if self.whole is not None:
            write_policy(self.whole, folder, final=final)

    def tensors(self) -> dict[str, Tensor]:
        """The parts of the trained weights, in float32."""
        return {f"weight.{name}": p.detach() for name, p in self.trained().items()}

    @torch.no_grad()
    def _take_over(self) -> None:
        """Cut the first process's weights into parts, and copy its buffers."""
        whole = self.whole
        weights = dict(whole.named_parameters()) if whole is not None else {}
        for name, parameter in self.model.named_parameters():
            mine = _parts(parameter)
            full = torch.empty(mine.shape, device=self.device)
            if whole is not None:
                full.copy_(weights[name])
            cut = distribute_tensor(full, mine.device_mesh, mine.placements)
            mine.to_local().copy_(cut.to_local())
        buffers = dict(whole.named_buffers()) if whole is not None else {}
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = buffer.to(self.device)
                if whole is not None:
                    full.copy_(buffers[f"{path}.{name}"])
                dist.broadcast(full, 0)
                setattr(module, name, full)


def _freeze(model: PreTrainedModel) -> None:
    model.requires_grad_(False)


def _empty(config: PretrainedConfig) -> PreTrainedModel:
    """A model without memory, in evaluation mode."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def _parts(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor), "the model is sharded"
    return parameter


def _whole_of(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """All parts put together, in every process."""
    there: Any = _parts(parameter).detach().to(device)
    return there.full_tensor()


def _run(
    model: PreTrainedModel, function: Callable[..., T], *arguments: object, **keywords: object
) -> T:
    return function(model, *arguments, **keywords)
