"""Policies in the process that computes with them: loaded, and served by its engine."""

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.model import LoadedModel, load_model
from fulmen.engine.platform import place, prepare_process
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.launch.policy import PolicySource, make_voice, model_threads
from fulmen.schema.config import RunSettings, ServeConfig
from fulmen.schema.errors import ConfigError


def pick_device(device: str) -> str:
    """The device that `auto` stands for, after checking one that was named.

    Raises:
        ConfigError: a device that this machine does not have, or not for so many processes.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = place()[1]
    if processes > 1 and device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    elif processes > 1 and device.startswith("cuda:"):
        raise ConfigError(f"device {device!r} is one for {processes} processes", hint="say cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:160]
        raise ConfigError(f"device {device!r} cannot be used ({reason})") from None
    return device


def load_policy(folder: Path | str, settings: RunSettings | ServeConfig) -> LoadedModel:
    """Load a model, with the process set right for it first."""
    prepare_process(threads=model_threads(settings.threads))
    return load_model(folder, dtype=settings.dtype, device=pick_device(settings.device))


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy with its model and the engine that serves it."""

    source: PolicySource
    loaded: LoadedModel
    grammars: GrammarCompiler
    engine: LocalEngine
    adapter: str | None = None
    """Of several in the model, the one that is this policy."""


def serve_policy(
    source: PolicySource,
    settings: RunSettings | ServeConfig,
    *,
    folder: Path | str | None = None,
    shape: Callable[[Any], None] = lambda _: None,
    adapter: str | None = None,
) -> LoadedPolicy:
    """Load a policy, as it came or as `folder` has it, and serve it for as long as this process
    lives.

    `shape` is applied to the model before it is served: adapters are put into it; of several,
    `adapter` is the policy's.
    """
    loaded = load_policy(folder or source.model, settings)
    shape(loaded.model)
    _, grammars = make_voice(loaded.tokenizer, loaded.model.config)
    engine = LocalEngine(
        loaded.model,
        name=source.name,
        max_context=loaded.max_context,
        max_batch=settings.max_batch,
        grammars=grammars,
        adapter=adapter,
    )
    return LoadedPolicy(source, loaded, grammars, engine, adapter)


def serve_in_groups(
    sources: Sequence[PolicySource],
    serve: Callable[[Sequence[PolicySource]], Sequence[LoadedPolicy]],
    base: Callable[[PolicySource], Hashable],
) -> list[LoadedPolicy]:
    """All policies of a run, in their order. `serve` is given those of equal `base` together: they
    share a model, others have their own.

    Raises:
        ModelError: one of them cannot be served.
    """
    groups: dict[Hashable, list[PolicySource]] = {}
    for source in sources:
        groups.setdefault(base(source), []).append(source)
    served = {policy.source.name: policy for group in groups.values() for policy in serve(group)}
    return [served[source.name] for source in sources]
