"""Activation checkpointing: of each layer only the input is kept for the backward pass.

Memory of a forward pass falls from everything a layer computes to one hidden state a layer; the
backward pass computes each layer again, a third more work.

Hugging Face's own switch works in training mode only, which would turn dropout on too.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fulmen.engine.adapted import as_chosen


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let a model's layers compute their activations again in the backward pass.

    Without gradients, as in sampling, nothing changes. What a layer is to do differently must be
    among its arguments, or an adapter that was chosen: the second computation may be in another
    thread. Once is as good as twice.
    """
    layers: Any = model.get_decoder().layers
    for layer in layers:
        # A partial of a bound method, not a closure: a deep copy of the model gets its own.
        if getattr(layer.forward, "func", None) is not _checkpointed:
            layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(plain: Callable[..., Any], *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 - those of any family's layer
    if not torch.is_grad_enabled():
        return plain(*inputs, **options)
    run = as_chosen(functools.partial(plain, **options))
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
