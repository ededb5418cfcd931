"""Log-probabilities of given tokens under a policy, with gradients."""

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulmen.engine.grammar import GrammarCompiler, Mask
from fulmen.engine.pytorch.masks import forbid
from fulmen.learner.batch import MicroBatch
from fulmen.schema.errors import GrammarError


class TokenScores(NamedTuple):
    """Per trained token, N of them."""

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
    """Compute log π(token | prefix) of every trained token of the batch.

    The vocabulary projection runs on the N positions that are trained, not on all B × T. The
    entropy has a gradient only if asked for: that keeps another N × V numbers alive. Tokens
    sampled under a grammar are scored under it.

    Raises:
        GrammarError: a token has a grammar, but there is no compiler for it.
    """
    logits = _trained_logits(model, batch).float() / batch.temperatures[:, None]  # (N, V)
    if any(grammar for grammar, _ in batch.completions):
        logits = forbid(logits, list(_masks(batch, grammars)))
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, batch.targets[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return TokenScores(chosen, entropy)


def _masks(batch: MicroBatch, grammars: GrammarCompiler | None) -> Iterator[Mask | None]:
    """What was allowed at each of the N trained tokens."""
    if grammars is None:
        raise GrammarError("a call has a grammar, but the learner was given none to compile it")
    for grammar, completion in batch.completions:
        yield from grammars.masks(grammar, completion) if grammar else repeat(None, len(completion))


def _trained_logits(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """(N, V) logits that predict the trained tokens, in the model's dtype."""
    before = batch.positions - 1
    head = model.get_output_embeddings()
    if head is not None and _projects_plainly(model):
        hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
        return head(hidden[batch.rows, before])
    logits = model(input_ids=batch.ids, use_cache=False).logits
    return logits[batch.rows, before]


def _projects_plainly(model: PreTrainedModel) -> bool:
    """Whether logits are the output embedding of the last hidden state and nothing else.

    Families that scale or cap their logits name the number in their configuration.
    """
    altered = ("final_logit_softcapping", "logit_scale", "logits_scaling", "mup_width_multiplier")
    config = model.config.get_text_config()
    return not any(getattr(config, name, None) for name in altered)
