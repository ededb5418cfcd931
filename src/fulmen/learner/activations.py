"""Activation checkpointing: of each layer only the input is kept for the backward pass.

Memory of a forward pass falls from everything a layer computes to one hidden state a layer; the
backward pass computes each layer again, a third more work.

Hugging Face's own switch works in training mode only, which would turn dropout on too.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let a model's layers compute their activations again in the backward pass.

    Without gradients, as in sampling, nothing changes. Context variables that were set in the
    forward pass are set in the second one, too, which on a GPU runs in another thread.
    """
    layers: Any = model.get_decoder().layers
    for layer in layers:
        # A partial of a bound method, not a closure: a deep copy of the model gets its own.
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(plain: Callable[..., Any], *inputs: Any, **options: Any) -> Any:  # noqa: ANN401 - those of any family's layer
    if not torch.is_grad_enabled():
        return plain(*inputs, **options)
    context = contextvars.copy_context()

    def run(*again: object) -> object:
        # A copy, because a context cannot be entered while it is in use.
        return context.copy().run(plain, *again, **options)

    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
