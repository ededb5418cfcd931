"""Whether a model can be trained on prefix trees, found out by trying."""

import random

import torch
from transformers import PreTrainedModel

from fulmen.engine.pytorch.attention import prepare
from fulmen.learner.batch import Layout, lay_out
from fulmen.learner.logprobs import score
from fulmen.schema.errors import ModelError
from fulmen.schema.records import Credited, Transition

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Nats by which a log-probability may differ between the two layouts; rounding is far below."""


def layout_for(model: PreTrainedModel) -> tuple[Layout, str]:
    """The layout for a model: trees where they pay, or else chains and the reason in words.

    The same three sequences are scored both ways. A family whose attention ignores the tree, keeps
    a state that is no attention, or wants something that trees do not know is found out here and
    not in a training that quietly learns something else.
    """
    if reason := _refusal(model):
        family = getattr(model.config, "model_type", type(model).__name__)
        return "chain", f"{family} is trained on plain sequences: {reason}"
    return "auto", ""


def _refusal(model: PreTrainedModel) -> str:
    """Why trees cannot be had; empty if they can."""
    try:
        prepare(model)
        tree, chains = _both_ways(model)
    except (ModelError, TypeError, ValueError, RuntimeError) as error:
        return str(error).splitlines()[0][:200]
    difference = float((tree - chains).abs().max())
    if not difference < _TOLERANCE.get(model.dtype, 0.2):
        return f"over a tree its log-probabilities differ by {difference:.2g} nats"
    return ""


@torch.no_grad()
def _both_ways(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the same calls, (N,) each, in the same order."""
    items, device = _probe(model), next(model.parameters()).device
    found = []
    layouts: tuple[Layout, Layout] = ("tree", "chain")
    for layout in layouts:
        (batch,) = lay_out(items, [1.0] * len(items), layout=layout, max_tokens=999, device=device)
        scores = score(model, batch).logprobs
        ids = [item.transition.call_id for item in batch.items]
        order = [ids.index(item.transition.call_id) for item in items]
        found.append(torch.cat([scores[batch.calls == place] for place in order]))
    return found[0], found[1]


def _probe(model: PreTrainedModel) -> list[Credited]:
    """Three calls over random tokens: one goes on where another ended, the third branches off."""
    rng, vocabulary = random.Random(0), model.config.get_text_config().vocab_size  # noqa: S311 - no secret

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(count))

    start, sampled = tokens(9), tokens(3)
    calls = [
        (start, sampled),
        (start + sampled + tokens(2), tokens(4)),
        (start[:6] + tokens(3), tokens(3)),
    ]
    return [
        Credited(
            advantage=1.0,
            transition=Transition(
                rollout_id="probe",
                call_id=str(number),
                agent="probe",
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=(0.0,) * len(completion),
                temperature=1.0,
                version=0,
            ),
        )
        for number, (prompt, completion) in enumerate(calls)
    ]
