"""How calls can be laid out for a model, found out by trying."""

import copy
import random
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulmen.engine.pytorch.attention import prepare, restore, window_of
from fulmen.learner.attention import TreeAttention
from fulmen.learner.batch import Layout, MicroBatch, lay_out
from fulmen.learner.logprobs import score
from fulmen.schema.errors import ModelError
from fulmen.schema.records import Credited, Transition

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Nats by which a log-probability may differ between two ways; rounding is far below."""


@torch.no_grad()
def layout_for(model: PreTrainedModel) -> tuple[Layout, str]:
    """The layout for a model: trees where they pay, or else chains and the reason in words.

    The same three sequences are scored in every way: as the model does by itself, as chains, as
    trees. A family whose attention ignores the tree, keeps a state that is no attention, or wants
    something that trees do not know is found out here and not in a training that quietly learns
    something else.

    Raises:
        ModelError: chains are not what the model computes by itself, so it cannot be trained.
    """
    family = getattr(model.config, "model_type", type(model).__name__)
    items = _probe(model)
    chains = _micro_batch(model, items, "chain")
    alone = _by_call(chains, _as_it_came(model, chains))
    reason = _unprepared(model)
    difference = _apart(_by_call(chains, score(model, chains).logprobs), alone)
    if not difference < _TOLERANCE.get(model.dtype, 0.2):
        raise ModelError(
            f"models of the family {family!r} cannot be trained: computed here, their "
            f"log-probabilities differ by {difference:.2g} nats from their own",
            hint="choose a family such as qwen3, qwen2, llama or mistral",
        )
    if reason := reason or _no_tree(model, items, alone):
        return "chain", f"{family} is trained on plain sequences: {reason}"
    return "auto", ""


def _unprepared(model: PreTrainedModel) -> str:
    """Why its attention cannot be replaced; empty if it is now."""
    try:
        prepare(model)
    except ModelError as error:
        return _first_line(error)
    return ""


def _no_tree(model: PreTrainedModel, items: list[Credited], alone: dict[str, Tensor]) -> str:
    """Why trees cannot be had; empty if they can."""
    batch = _micro_batch(model, items, "tree")
    assert batch.attention is not None, "it is a tree"
    watched = _Watched(batch.attention)
    try:
        tree = score(model, replace(batch, attention=watched)).logprobs
    except (ModelError, TypeError, ValueError, RuntimeError) as error:
        return _first_line(error)
    difference = _apart(_by_call(batch, tree), alone)
    if not difference < _TOLERANCE.get(model.dtype, 0.2):
        return f"over a tree its log-probabilities differ by {difference:.2g} nats"
    # No probe is as long as a window of thousands, so what the layers ask for is looked at instead.
    config = model.config.get_text_config()
    if watched.windows != [window_of(config, n) for n in range(config.num_hidden_layers)]:
        return "not all of its layers say how far back they look"
    return ""


class _Watched:
    """Attention over a tree, and what is asked of it."""

    def __init__(self, attention: TreeAttention) -> None:
        self._attention = attention
        self.layers = 0
        self.windows: list[object] = []
        """Of each layer that has used it."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **keywords: object) -> Tensor:
        self.layers += 1
        self.windows.append(keywords.get("sliding_window"))
        return self._attention(query, key, value, **keywords)


def _as_it_came(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """(N,) log-probabilities by the model's own forward pass, with the attention it came with."""
    # The engine may be sampling from the model: a copy, which has the same weights, is changed.
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    restore(twin)
    logits = twin(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)[batch.before]
    return torch.log_softmax(logits.float(), -1).gather(1, batch.targets[:, None]).squeeze(1)


def _micro_batch(model: PreTrainedModel, items: list[Credited], layout: Layout) -> MicroBatch:
    device = next(model.parameters()).device
    (batch,) = lay_out(items, [1.0] * len(items), layout=layout, max_tokens=999, device=device)
    return batch


def _by_call(batch: MicroBatch, logprobs: Tensor) -> dict[str, Tensor]:
    ids = [item.transition.call_id for item in batch.items]
    return {call: logprobs[batch.calls == place] for place, call in enumerate(ids)}


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, nats; NaN if a number is."""
    return float(torch.cat([one[call] - other[call] for call in one]).abs().max())


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


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
