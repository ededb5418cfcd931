"""Everything between an agent and the policy, put together: model, engine, gateway, server, pool.

The one place where rooms meet. It decides nothing that a setting does not decide.
"""

import os
from pathlib import Path

from fulmen.engine.model import LoadedModel, load_model
from fulmen.engine.platform import prepare_process

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
    """Load a model for serving and training, with the process set right for it first."""
    prepare_process(threads=model_threads(settings.threads))
    return load_model(folder, dtype=settings.dtype, device=pick_device(settings.device))
