"""A Hugging Face model folder, loaded for serving and training, or a clear word why not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fulmen.schema.errors import ModelError


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model and its tokenizer."""

    model: Any
    """transformers.PreTrainedModel, in evaluation mode (no dropout, in training neither)."""
    tokenizer: Any
    """transformers.PreTrainedTokenizerBase with a chat template."""
    name: str
    """Shown to clients."""
    max_context: int
    """Prompt and completion together, tokens."""

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a model folder holds beside the weights."""

    config: Any
    """transformers.PretrainedConfig."""
    tokenizer: Any
    """transformers.PreTrainedTokenizerBase with a chat template."""


def read_folder(source: Path | str) -> ModelFolder:
    """Read everything but the weights.

    Raises:
        ModelError: something needed is missing or unreadable; the message names it.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    _check_folder(source)
    config = _load(AutoConfig, source, "configuration")
    tokenizer = _load(AutoTokenizer, source, "tokenizer")
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"model {str(source)!r} has no chat template, so messages cannot be rendered",
            hint="use an instruction-tuned model, or add chat_template.jinja to the folder",
        )
    return ModelFolder(config, tokenizer)


def load_model(
    source: Path | str,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str = "cpu",
) -> LoadedModel:
    """Load a model and its tokenizer from a folder, or from a Hub id.

    Raises:
        ModelError: something needed is missing or unreadable; the message names it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = read_folder(source)
    model = _load(AutoModelForCausalLM, source, "weights", dtype=getattr(torch, dtype))
    model = model.to(device).eval()
    text = folder.config.get_text_config()
    return LoadedModel(
        model=model,
        tokenizer=folder.tokenizer,
        name=Path(source).name or str(source),
        max_context=int(getattr(text, "max_position_embeddings", None) or 4096),
    )


def _check_folder(source: Path | str) -> None:
    """A path that exists must be a model folder; anything else may be a Hub id."""
    path = Path(source)
    if not path.exists():
        looks_like_path = (
            path.is_absolute() or str(source).startswith((".", "~")) or (len(path.parts) != 2)
        )
        if looks_like_path:
            raise ModelError(f"model {str(source)!r}: no such folder")
        return
    if (path / "adapter").is_dir() and not (path / "config.json").is_file():
        raise ModelError(
            f"{str(source)!r} holds an adapter and no model",
            hint="`fulmen export` makes a model of it",
        )
    if not (path / "config.json").is_file():
        raise ModelError(f"model {str(source)!r} has no config.json", hint="give a model folder")
    has_tokenizer = any(
        (path / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    )
    if not has_tokenizer:
        raise ModelError(
            f"model {str(source)!r} has no tokenizer",
            hint="save it beside the weights: tokenizer.save_pretrained(folder)",
        )


def _load(
    kind: Any,  # noqa: ANN401 - one of transformers' Auto classes, which share no type
    source: Path | str,
    what: str,
    **options: object,
) -> Any:  # noqa: ANN401 - what that class makes
    try:
        return kind.from_pretrained(source, **options)
    except Exception as error:
        # transformers raises a dozen kinds here (OSError, ValueError, KeyError, SafetensorError …)
        # with paragraphs of advice; the first line is the reason.
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else ""
        raise ModelError(
            f"the {what} of model {str(source)!r} cannot be loaded "
            f"({type(error).__name__}: {reason})"
        ) from error
