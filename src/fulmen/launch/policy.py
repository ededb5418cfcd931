"""A model folder, loaded and served."""

import os
from dataclasses import dataclass
from pathlib import Path

from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.model import LoadedModel, load_model
from fulmen.engine.platform import prepare_process
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.gateway.exchange import Policy
from fulmen.gateway.render import ChatRenderer, make_renderer
from fulmen.schema.config import RunSettings, ServeConfig
from fulmen.schema.errors import ConfigError


def model_threads(threads: int | None) -> int:
    """CPU threads for the model: all cores but one, which the agents and the gateway need."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return threads or max(1, (cores or 1) - 1)


def pick_device(device: str) -> str:
    """The device that `auto` stands for, after checking one that was named.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
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
class ServedPolicy:
    """A model with everything that serving it takes."""

    loaded: LoadedModel
    renderer: ChatRenderer
    grammars: GrammarCompiler
    engine: LocalEngine

    @property
    def as_policy(self) -> Policy:
        """As the gateway knows it."""
        return Policy(self.loaded.name, self.engine, self.renderer)


def serve_policy(folder: Path | str, settings: RunSettings | ServeConfig) -> ServedPolicy:
    """Load a model and serve it from this process; the caller closes the engine."""
    loaded = load_policy(folder, settings)
    config = loaded.model.config
    renderer = make_renderer(loaded.tokenizer, config.model_type)
    grammars = GrammarCompiler(
        loaded.tokenizer, config.get_text_config().vocab_size, renderer.stop_ids
    )
    engine = LocalEngine(
        loaded.model,
        name=loaded.name,
        max_context=loaded.max_context,
        max_batch=settings.max_batch,
        grammars=grammars,
    )
    return ServedPolicy(loaded, renderer, grammars, engine)
