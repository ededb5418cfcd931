"""A training step three ways: `make bench-learner`.

Transition-level, as a single-turn trainer does it: one padded row a call, logits of every position,
the same loss. Chains: what continues is merged, each rollout for itself. Trees: every distinct
position once. The work is synthetic (one group of 8 rollouts, prompt 60 tokens, each turn samples
12 and observes 15) and recorded (one step of each mini experiment, 16 groups of 8 rollouts, sampled
by its base model). All count the tokens of all transitions as done, so the figures say how fast
rollouts are learned from, however that is done.

python learner.py [--turns 2 5] [--agents calc] [--pairs 5]
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fulmen.engine.platform import prepare_process

prepare_process(threads=1)

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from fulmen.engine.pytorch.attention import prepare
from fulmen.learner.batch import Layout
from fulmen.learner.learner import Learner
from fulmen.learner.losses import clipped_surrogate
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import Optimiser, OptimiserConfig
from fulmen.learner.terms import Terms
from fulmen.schema.records import Credited
from recorded import EXAMPLES, recorded
from results import result, together
from synthetic import group

PROMPT, SAMPLED, OBSERVED, ROLLOUTS, VOCABULARY = 60, 12, 15, 8, 600
BUDGET = 8192


def small_model() -> Qwen3ForCausalLM:
    """Of Calc-mini's size."""
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


def synthetic(turns: int) -> list[Credited]:
    """A group of so many turns."""
    return group(
        VOCABULARY,
        turns=turns,
        prompt=PROMPT,
        sampled=SAMPLED,
        observed=OBSERVED,
        rollouts=ROLLOUTS,
        seed=turns,
    )


class Rows(NamedTuple):
    """Calls side by side, each with its whole context."""

    ids: torch.Tensor
    """(B, T)."""
    before: torch.Tensor
    """(N,) places in B · T."""
    targets: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor


def rows_of(items: Sequence[Credited]) -> list[Rows]:
    """A padded row for every call, whatever they share; rows of similar length together."""
    ordered = sorted(items, key=_length)
    size = max(1, BUDGET // _length(ordered[-1]))
    return [_rows(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def _length(item: Credited) -> int:
    return len(item.transition.prompt_ids) + len(item.transition.completion_ids)


def _rows(items: Sequence[Credited]) -> Rows:
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


def plain_step(model: PreTrainedModel, optimiser: Optimiser, items: Sequence[Credited]) -> None:
    """One row a call, logits everywhere."""
    sampled = sum(len(item.transition.completion_ids) for item in items)
    for rows in rows_of(items):
        table = torch.log_softmax(model(input_ids=rows.ids, use_cache=False).logits, -1)
        chosen = table.flatten(0, 1)[rows.before].gather(1, rows.targets[:, None])[:, 0]
        calls = torch.zeros_like(rows.targets)  # of no account to this loss
        terms = Terms(chosen, rows.logprobs, rows.logprobs, rows.advantages, calls)
        loss = clipped_surrogate(terms, low=0.2, high=0.28).loss
        (loss.sum() / sampled).backward()
    optimiser.clip()
    optimiser.step()


def learner(model: PreTrainedModel, layout: Layout) -> Learner:
    made = Learner(
        model,
        objective=Objective(micro_batch_tokens=BUDGET),
        optimiser=OptimiserConfig(1e-6),
        updating=lambda _: nullcontext(),
    )
    made.layout = layout
    return made


def compare(name: str, model: PreTrainedModel, items: Sequence[Credited], pairs: int) -> None:
    """Three ways in turns, and what the layout chosen by itself makes of it."""
    items = [item for item in items if item.advantage and item.transition.completion_ids]
    total = sum(map(_length, items))
    optimiser = Optimiser(model, OptimiserConfig(1e-6))
    prepare(model)
    ways = {layout: learner(model, layout) for layout in ("auto", "chain")}
    computed = {way: one.learn(items)["learn/computed_tokens"] for way, one in ways.items()}
    seconds = together(
        {way: partial(one.learn, items) for way, one in ways.items()}
        | {"transitions": partial(plain_step, model, optimiser, items)},
        rounds=pairs,
    )
    peer = {"peer": "transition-level step", "peer_value": total / seconds["transitions"]}
    result(f"learner.tree_speedup.{name}", total / seconds["auto"], "tok/s", **peer)
    result(f"learner.tokens_saved.{name}", total / computed["auto"], "x")
    result(
        f"learner.tree_vs_chain.{name}",
        total / seconds["auto"],
        "tok/s",
        peer="chains",
        peer_value=total / seconds["chain"],
    )
    result(f"learner.tokens_saved_vs_chain.{name}", computed["chain"] / computed["auto"], "x")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a training step three ways.")
    parser.add_argument("--turns", type=int, nargs="*", default=[2, 5, 10, 20])
    parser.add_argument("--agents", nargs="*", default=["calc", "sql", "rag"])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    for turns in options.turns:
        compare(f"t{turns}", small_model(), synthetic(turns), options.pairs)
    for agent in options.agents:
        base: Path = EXAMPLES / agent / "base"
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        compare(agent, model, recorded(agent), options.pairs)


if __name__ == "__main__":
    main()
