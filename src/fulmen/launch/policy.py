"""A model folder, loaded and served."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.model import LoadedModel, load_model
from fulmen.engine.platform import place, prepare_process
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


def make_voice(tokenizer: Any, config: Any) -> tuple[ChatRenderer, GrammarCompiler]:  # noqa: ANN401 - transformers'
    """What turns messages into a model's tokens, and what knows which tokens a form allows."""
    renderer = make_renderer(tokenizer, config.model_type)
    vocabulary = config.get_text_config().vocab_size
    return renderer, GrammarCompiler(tokenizer, vocabulary, renderer.stop_ids)


def serve_policy(
    folder: Path | str,
    settings: RunSettings | ServeConfig,
    shape: Callable[[Any], None] = lambda _: None,
) -> ServedPolicy:
    """Load a model and serve it from this process; the caller closes the engine.

    `shape` is applied to the model before it is served: an adapter is put into it.
    """
    loaded = load_policy(folder, settings)
    shape(loaded.model)
    renderer, grammars = make_voice(loaded.tokenizer, loaded.model.config)
    engine = LocalEngine(
        loaded.model,
        name=loaded.name,
        max_context=loaded.max_context,
        max_batch=settings.max_batch,
        grammars=grammars,
    )
    return ServedPolicy(loaded, renderer, grammars, engine)
