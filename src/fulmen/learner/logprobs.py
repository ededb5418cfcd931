"""Log-probabilities of given tokens under a policy, with gradients."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulmen.engine.grammar import GrammarCompiler, Mask
from fulmen.engine.pytorch.attention import own_mask
from fulmen.engine.pytorch.batch import project
from fulmen.learner.batch import MicroBatch
from fulmen.learner.vocabulary import Predictions, TokenScores, token_scores
from fulmen.schema.errors import GrammarError, ModelError


def score(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    grammars: GrammarCompiler | None = None,
    entropy_gradient: bool = False,
    head: Callable[[Tensor], Tensor] | None = None,
) -> TokenScores:
    """Compute log π(token | prefix) of every sampled token of the batch.

    The vocabulary projection runs on the positions that predict sampled tokens, each once for what
    several calls share, and in chunks. Tokens sampled under a grammar are scored under it. The
    entropy has a gradient only if asked for. A value head, (N, H) to (N,), reads the same hidden
    states.

    Raises:
        GrammarError: a token has a grammar, but there is no compiler for it.
        ModelError: the batch is a forest, and the model does not follow it.
    """
    masked = any(item.transition.grammar for item in batch.items)
    first, place = _distinct(batch, masked)
    predictions = _predictions(model, batch, batch.before[first])
    scores = token_scores(
        predictions,
        batch.targets[first],
        batch.temperatures[first],
        masks=list(_masks(batch, grammars)) if masked else (),
        entropy_gradient=entropy_gradient,
    )
    found = TokenScores(scores.logprobs[place], scores.entropy[place])
    if head is None:
        return found
    if _projects_by_itself(model):  # what it predicts is logits already
        return found._replace(values=head(hidden_before(model.get_decoder(), batch)))
    return found._replace(values=head(predictions.hidden)[place])


def hidden_before(decoder: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """(N, H) last hidden states that the N sampled tokens are predicted from.

    Raises:
        ModelError: the batch is a forest, and the model does not follow it.
    """
    return _hidden(decoder, batch, batch.before)


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


def _predictions(model: PreTrainedModel, batch: MicroBatch, places: Tensor) -> Predictions:
    """What the model predicts at N' places of the batch."""
    vocabulary = model.config.get_text_config().vocab_size
    if _projects_by_itself(model):
        logits = _forward(model, batch).logits.flatten(0, 1)[places]
        return Predictions(logits, lambda rows: rows, vocabulary)
    hidden = _hidden(model.get_decoder(), batch, places)
    return Predictions(hidden, partial(project, model), vocabulary)


def _hidden(decoder: torch.nn.Module, batch: MicroBatch, places: Tensor) -> Tensor:
    return _forward(decoder, batch).last_hidden_state.flatten(0, 1)[places]


def _forward(module: torch.nn.Module, batch: MicroBatch):  # noqa: ANN202 - transformers' outputs
    if batch.attention is None:
        return module(input_ids=batch.ids, use_cache=False)
    before = batch.attention.layers  # other models may have used it
    with own_mask():
        output = module(
            input_ids=batch.ids,
            position_ids=batch.depths,
            use_cache=False,
            own_attention=batch.attention,
        )
    if batch.attention.layers == before:
        raise ModelError("the model's attention does not take another in its place")
    return output


def _projects_by_itself(model: PreTrainedModel) -> bool:
    """Whether logits are made of the last hidden state in a way that `project` does not know.

    Families that scale or cap their logits name the number in their configuration.
    """
    config = model.config.get_text_config()
    scaled = getattr(config, "mup_width_multiplier", None)
    return bool(scaled) or model.get_output_embeddings() is None
