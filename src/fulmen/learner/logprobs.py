"""Log-probabilities of given tokens under a policy, with gradients."""

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulmen.engine.grammar import GrammarCompiler, Mask
from fulmen.engine.pytorch.attention import own_mask
from fulmen.engine.pytorch.masks import forbid
from fulmen.learner.batch import MicroBatch
from fulmen.schema.errors import GrammarError, ModelError


class TokenScores(NamedTuple):
    """Per sampled token, N of them."""

    logprobs: Tensor
    """(N,) float32, nats, at the temperature the token was sampled with."""
    entropy: Tensor
    """(N,) float32, nats, of the distribution it was sampled from."""


def score(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    grammars: GrammarCompiler | None = None,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Compute log π(token | prefix) of every sampled token of the batch.

    The vocabulary projection runs on the positions that predict sampled tokens, each once for what
    several calls share. The entropy has a gradient only if asked for: that keeps another table of
    the vocabulary's width alive. Tokens sampled under a grammar are scored under it.

    Raises:
        GrammarError: a token has a grammar, but there is no compiler for it.
        ModelError: the batch is a forest, and the model does not follow it.
    """
    masked = any(item.transition.grammar for item in batch.items)
    first, place = _distinct(batch, masked)
    logits = _logits(model, batch, batch.before[first]).float()
    logits = logits / batch.temperatures[first, None]  # (N', V)
    if masked:
        logits = forbid(logits, list(_masks(batch, grammars)))
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, batch.targets[first, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return TokenScores(chosen[place], entropy[place])


def _distinct(batch: MicroBatch, masked: bool) -> tuple[Tensor, Tensor]:
    """Which of the N tokens to score, N' of them, and for all N which of those they equal."""
    every = torch.arange(len(batch.before), device=batch.before.device)
    if masked or batch.attention is None:
        return every, every  # grammars may differ where tokens do not; chains share nothing
    key = torch.stack([batch.before, batch.targets, batch.temperatures.view(torch.int32).long()])
    _, place = torch.unique(key, dim=1, return_inverse=True)
    count = int(place.max()) + 1
    if count == len(every):
        return every, every
    first = torch.full((count,), len(every), device=every.device)
    return first.scatter_reduce(0, place, every, "amin"), place


def _masks(batch: MicroBatch, grammars: GrammarCompiler | None) -> Iterator[Mask | None]:
    """What was allowed at each of the N sampled tokens."""
    if grammars is None:
        raise GrammarError("a call has a grammar, but the learner was given none to compile it")
    for item in batch.items:
        grammar, completion = item.transition.grammar, item.transition.completion_ids
        yield from grammars.masks(grammar, completion) if grammar else repeat(None, len(completion))


def _logits(model: PreTrainedModel, batch: MicroBatch, places: Tensor) -> Tensor:
    """(N', V) logits at places of the batch, in the model's dtype."""
    head = model.get_output_embeddings()
    if head is not None and _projects_plainly(model):
        return head(_forward(model.get_decoder(), batch).last_hidden_state.flatten(0, 1)[places])
    return _forward(model, batch).logits.flatten(0, 1)[places]


def _forward(module: torch.nn.Module, batch: MicroBatch):  # noqa: ANN202 - transformers' outputs
    if batch.attention is None:
        return module(input_ids=batch.ids, use_cache=False)
    with own_mask():
        output = module(
            input_ids=batch.ids,
            position_ids=batch.depths,
            use_cache=False,
            own_attention=batch.attention,
        )
    if not batch.attention.layers:
        raise ModelError("the model's attention does not take another in its place")
    return output


def _projects_plainly(model: PreTrainedModel) -> bool:
    """Whether logits are the output embedding of the last hidden state and nothing else.

    Families that scale or cap their logits name the number in their configuration.
    """
    altered = ("final_logit_softcapping", "logit_scale", "logits_scaling", "mup_width_multiplier")
    config = model.config.get_text_config()
    return not any(getattr(config, name, None) for name in altered)
