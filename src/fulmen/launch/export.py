"""`fulmen export`: a checkpoint made into a model folder for transformers, vLLM and others."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from fulmen.engine.adapters import FOLDER, merged_weights, write_model
from fulmen.learner.checkpoint import PROGRESS, STATE, load_tensors, saved_shapes
from fulmen.schema.errors import ConfigError, ModelError


def export(checkpoint: Path, out: Path) -> None:
    """Write a model folder from a checkpoint: an adapter merged into its model; weights that were
    trained in float32 beside a coarser model, in float32.

    Raises:
        ConfigError: `out` exists.
        ModelError: `checkpoint` is none, or the model of its adapter is not there.
    """
    if not (checkpoint / PROGRESS).is_file():
        raise ModelError(f"{checkpoint} is no checkpoint", hint="give a folder of checkpoints/")
    if out.exists():
        raise ConfigError(f"{out} exists already", hint="name a folder that does not")
    logging.disable_progress_bar()
    draft = out.with_name(out.name + ".new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.is_file() and file.name != PROGRESS:
            shutil.copy2(file, draft)
    if (checkpoint / FOLDER).is_dir():
        _merged(checkpoint / FOLDER, draft)
    elif masters := _masters(checkpoint):
        model = _load(checkpoint, dtype=torch.float32)
        named = dict(model.named_parameters())
        wanted = {f"weight.{name}": named[name].detach() for name in masters if name in named}
        load_tensors(checkpoint / STATE, wanted)
        model.save_pretrained(draft)
    draft.rename(out)


def _masters(checkpoint: Path) -> list[str]:
    """Names of the weights that are there in float32."""
    saved = saved_shapes(checkpoint / STATE)
    return [name.removeprefix("weight.") for name in saved if name.startswith("weight.")]


def _merged(adapter: Path, out: Path) -> None:
    told = json.loads(adapter.joinpath("adapter_config.json").read_text())
    model = _load(told["base_model_name_or_path"], dtype="auto")
    model.load_adapter(str(adapter))
    write_model(model, merged_weights(model), out)


def _load(source: Path | str, *, dtype: Any) -> PreTrainedModel:  # noqa: ANN401 - torch.dtype or "auto"
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ModelError(f"model {str(source)!r} cannot be loaded ({reason})") from error
