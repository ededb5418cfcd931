"""The learner of a run, from its settings: in one process, or in those that torchrun starts."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from fulmen.engine.adapters import DEFAULT, AdapterConfig, add_adapter, load_adapter
from fulmen.engine.model import LoadedModel, read_folder
from fulmen.engine.platform import place, prepare_process
from fulmen.launch.critic import make_critic
from fulmen.launch.host_orders import HostPlan
from fulmen.launch.loading import (
    LoadedPolicy,
    load_policy,
    pick_device,
    serve_policy,
)
from fulmen.launch.objective import make_objective
from fulmen.launch.policy import PolicySource, make_voice, model_threads
from fulmen.learner.activations import checkpoint_layers
from fulmen.learner.learner import Learner, Updating
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.learner.ranks import Ranks
from fulmen.learner.sharded import Plan, Sharded
from fulmen.learner.together import LeadingLearner
from fulmen.learner.weights import OneAdapter
from fulmen.schema.training import TrainConfig


def base_of(config: TrainConfig, source: PolicySource) -> Hashable:
    """Policies for which this is equal are adapters of one model, loaded once."""
    if config.lora_rank is None or place()[1] > 1:
        return "of its own", source.name
    folder = Path(source.model)
    return "shared", str(folder.resolve()) if folder.exists() else source.model


def serve_trained(
    config: TrainConfig, plan: HostPlan, sources: Sequence[PolicySource]
) -> list[LoadedPolicy]:
    """A policy of a run as it is now, its model or its part of the last checkpoint, served; or
    several that are adapters of one model, sampled together."""
    own = [plan.checkpoint / source.place if plan.checkpoint else None for source in sources]
    names = [DEFAULT, *(f"adapter-{number}" for number in range(1, len(sources)))]

    def shape(model: PreTrainedModel) -> None:
        for folder, name in zip(own, names, strict=True):
            _adapt(config, folder, model, name)

    first = serve_policy(
        sources[0],
        config,
        folder=plan.folder(sources[0]),
        shape=shape,
        adapter=DEFAULT if len(sources) > 1 else None,
    )
    others = zip(sources[1:], names[1:], strict=True)
    return [first, *(_beside(first, source, name) for source, name in others)]


def _beside(first: LoadedPolicy, source: PolicySource, adapter: str) -> LoadedPolicy:
    engine = first.engine.beside(name=source.name, adapter=adapter)
    return replace(first, source=source, engine=engine, adapter=adapter)


@contextmanager
def joined(config: TrainConfig) -> Iterator[Ranks | None]:
    """The processes of this run, this one among them; None if it is alone."""
    if place()[1] == 1:
        yield None
        return
    prepare_process(threads=model_threads(config.threads))
    ranks = Ranks(torch.device(pick_device(config.device)))
    yield ranks
    # After an error nothing is said: the others may be in the middle of something together, and
    # end when this process does.
    ranks.close()


def make_learner(
    config: TrainConfig,
    policy: LoadedPolicy,
    ranks: Ranks | None,
    *,
    updating: Updating,
    resumed: bool,
) -> Learner:
    """The learner on the weights of a policy's engine; where there are several processes, that of
    the first.

    Raises:
        FulmenError: a function, a critic or a reference cannot be had.
    """
    source = policy.source
    arguments = _arguments(config) | {
        "updating": updating,
        "grammars": policy.grammars,
        "critic": make_critic(config, policy.loaded, _optimiser(config), base=source.model),
    }
    base = None
    if _needs_reference(config, resumed=resumed):
        base = load_policy(source.model, config)
    if ranks is None:
        return _alone(config, policy, base, arguments)
    model = policy.loaded.model
    weights = Sharded(ranks, model, model.config, _plan(config, trained=True))
    reference = _reference(config, ranks, base, model.config) if base else None
    return LeadingLearner(ranks, source.name, weights, reference=reference, **arguments)


def make_follower(
    config: TrainConfig, source: PolicySource, ranks: Ranks, *, resumed: bool
) -> Learner:
    """The learner of a policy in one of the other processes."""
    folder = read_folder(source.model)
    weights = Sharded(ranks, None, folder.config, _plan(config, trained=True))
    reference = None
    if _needs_reference(config, resumed=resumed):
        reference = _reference(config, ranks, None, folder.config)
    return Learner(
        weights,
        reference=reference,
        grammars=make_voice(folder.tokenizer, folder.config)[1],
        updating=lambda _: nullcontext(),
        **_arguments(config),
    )


def _alone(
    config: TrainConfig, policy: LoadedPolicy, base: LoadedModel | None, arguments: dict[str, Any]
) -> Learner:
    model = policy.loaded.model
    if config.activation_checkpointing:
        checkpoint_layers(model)
    reference = base.model if base is not None else None
    weights = model if policy.adapter is None else OneAdapter(model, policy.adapter)
    return Learner(weights, reference=reference, **arguments)


def _needs_reference(config: TrainConfig, *, resumed: bool) -> bool:
    """With a KL term the reference is the model that training began with, not the checkpoint. With
    an adapter that is the model without it, which is there anyway."""
    return config.kl_coefficient > 0 and resumed and not config.lora_rank


def _reference(
    config: TrainConfig, ranks: Ranks, base: LoadedModel | None, shape: PretrainedConfig
) -> Sharded:
    whole = base.model if base is not None else None
    reference = Sharded(ranks, whole, shape, _plan(config, trained=False))
    reference.whole = None  # it was there to be cut
    return reference


def _plan(config: TrainConfig, *, trained: bool) -> Plan:
    return Plan(
        dtype=getattr(torch, config.dtype),
        offload=config.offload_optimiser,
        shape=partial(_shape, config) if trained else _freeze,
    )


def _shape(config: TrainConfig, model: PreTrainedModel) -> None:
    _adapt(config, None, model)
    if config.activation_checkpointing:
        checkpoint_layers(model)


def _freeze(model: PreTrainedModel) -> None:
    model.requires_grad_(False)


def _adapt(
    config: TrainConfig, checkpoint: Path | None, model: PreTrainedModel, name: str = DEFAULT
) -> None:
    """Put an adapter into the model if one is trained: that of the checkpoint, or a new one."""
    if config.lora_rank is None:
        return
    adapter = AdapterConfig(
        rank=config.lora_rank,
        alpha=config.lora_alpha or 2 * config.lora_rank,
        targets=config.lora_targets,
        seed=config.seed,
    )
    add_adapter(model, adapter, name)
    if checkpoint is not None:
        load_adapter(model, checkpoint, name)


def _arguments(config: TrainConfig) -> dict[str, Any]:
    """What the learner of every process is given."""
    # Several processes keep their parts of the weights in the CPU's memory, and the rest with them.
    alone = config.offload_optimiser and place()[1] == 1
    return {
        "objective": make_objective(config),
        "optimiser": replace(_optimiser(config), offload=alone),
    }


def _optimiser(config: TrainConfig) -> OptimiserConfig:
    updates = config.updates_per_step * config.epochs
    return OptimiserConfig(
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps * updates,
        schedule=config.schedule,
        total_steps=config.steps * updates,
        max_grad_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
        beta2=config.adam_beta2,
        offload=config.offload_optimiser,
    )
