"""Learner throughput beside a plain training step: `make bench-learner`.

The work: one step on multi-turn rollouts (prompt 60 tokens; each turn samples 12 and observes 15),
a model of Calc-mini's size. The peer does what a single-turn trainer does with transitions: one
padded row a call, logits of every position, the same loss. Both count the tokens of all
transitions as done, so the figure says how fast rollouts are learned from, however that is done.
"""

import random
from contextlib import nullcontext
from typing import NamedTuple

from fulmen.engine.platform import prepare_process

prepare_process(threads=1)

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from fulmen.learner.learner import Learner
from fulmen.learner.losses import clipped_surrogate
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import Optimiser, OptimiserConfig
from fulmen.learner.terms import Terms
from fulmen.schema.records import Credited, Transition
from results import alternate, result

PROMPT, SAMPLED, OBSERVED, ROLLOUTS, VOCABULARY = 60, 12, 15, 64, 600
BUDGET = 8192


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def transitions(turns: int, seed: int) -> list[Credited]:
    """Random rollouts; advantages of both signs."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(count))

    found = []
    for rollout in range(ROLLOUTS):
        context, advantage = tokens(PROMPT), rng.gauss(0, 1)
        for turn in range(turns):
            completion = tokens(SAMPLED)
            transition = Transition(
                rollout_id=str(rollout),
                call_id=f"{rollout}-{turn}",
                agent="agent",
                prompt_ids=context,
                completion_ids=completion,
                logprobs=(-6.4,) * SAMPLED,
                temperature=1.0,
                version=0,
            )
            found.append(Credited(transition=transition, advantage=advantage))
            context = context + completion + tokens(OBSERVED)
    return found


class Rows(NamedTuple):
    """Calls side by side, each with its whole context."""

    ids: torch.Tensor
    """(B, T)."""
    before: torch.Tensor
    """(N,) places in B · T."""
    targets: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor


def rows_of(items: list[Credited]) -> list[Rows]:
    """A padded row for every call, whatever they share; rows of similar length together."""
    ordered = sorted(items, key=lambda item: len(item.transition.prompt_ids))
    longest = len(ordered[-1].transition.prompt_ids) + SAMPLED
    size = max(1, BUDGET // longest)
    return [_rows(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def _rows(items: list[Credited]) -> Rows:
    calls = [item.transition for item in items]
    sequences = [torch.tensor(call.prompt_ids + call.completion_ids) for call in calls]
    ids = pad_sequence(sequences, batch_first=True)
    places = [
        row * ids.shape[1] + len(call.prompt_ids) - 1 + torch.arange(len(call.completion_ids))
        for row, call in enumerate(calls)
    ]
    return Rows(
        ids,
        torch.cat(places),
        torch.tensor([token for call in calls for token in call.completion_ids]),
        torch.tensor([value for call in calls for value in call.logprobs]),
        torch.tensor([item.advantage for item in items for _ in item.transition.completion_ids]),
    )


def plain_step(policy: Qwen3ForCausalLM, optimiser: Optimiser, items: list[Credited]) -> None:
    """One row a call, logits everywhere."""
    sampled = sum(len(item.transition.completion_ids) for item in items)
    for rows in rows_of(items):
        table = torch.log_softmax(policy(input_ids=rows.ids, use_cache=False).logits, -1)
        chosen = table.flatten(0, 1)[rows.before].gather(1, rows.targets[:, None])[:, 0]
        calls = torch.zeros_like(rows.targets)  # of no account to this loss
        terms = Terms(chosen, rows.logprobs, rows.logprobs, rows.advantages, calls)
        loss = clipped_surrogate(terms, low=0.2, high=0.28).loss
        (loss.sum() / sampled).backward()
    optimiser.clip()
    optimiser.step()


def main() -> None:
    for turns in (1, 2, 5, 10):
        ours = Learner(
            model(),
            objective=Objective(micro_batch_tokens=BUDGET),
            optimiser=OptimiserConfig(1e-4),
            updating=lambda _: nullcontext(),
        )
        peer = model()
        optimiser = Optimiser(peer, OptimiserConfig(1e-4))
        items = transitions(turns, seed=turns)
        total = sum(len(c.transition.prompt_ids) + SAMPLED for c in items)
        mine, plain = alternate(
            lambda _, ours=ours, items=items: ours.learn(items),
            lambda _, peer=peer, optimiser=optimiser, items=items: plain_step(
                peer, optimiser, items
            ),
        )
        result(
            f"learner.tokens_per_s.t{turns}",
            total / mine,
            "tok/s",
            peer="transition-level step",
            peer_value=total / plain,
        )


if __name__ == "__main__":
    main()
