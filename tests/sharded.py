"""Training in one process and in two: `torchrun … tests/sharded.py FOLDER` is the other half of
tests/integration/test_sharded.py, which trains in one process what this trains in two.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from batches import credited
from fulmen.engine.adapters import AdapterConfig, add_adapter
from fulmen.learner.activations import checkpoint_layers
from fulmen.learner.learner import Learner
from fulmen.learner.losses import supervised
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.learner.ranks import Ranks
from fulmen.learner.sharded import Plan, Sharded
from fulmen.learner.terms import Terms
from fulmen.learner.together import LeadingLearner, end, follow
from fulmen.schema.records import Credited

CONFIG = Qwen3Config(
    vocab_size=41,
    hidden_size=16,
    intermediate_size=33,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)
"""Sizes that two processes cannot halve."""
ADAPTER = AdapterConfig(rank=3, alpha=6, seed=1)


def nothing(terms: Terms) -> torch.Tensor:
    """A correction that leaves every token out."""
    return torch.zeros_like(terms.old)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"micro_batch_tokens": 10},
    "everything": {
        "micro_batch_tokens": 12,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "updates_per_step": 2,
        "epochs": 2,
        "old": "learner",
    },
    "adapter": {"micro_batch_tokens": 14, "kl_coefficient": 0.1},
    "bfloat16": {"micro_batch_tokens": 10},
    "one-sided": {"micro_batch_tokens": 10, "loss": supervised},
    "silent": {"micro_batch_tokens": 10, "correction": nothing},
}
"""In `one-sided` a process has a micro-batch that says nothing; in `silent` all of both say so."""


RESUMED = ("plain", "bfloat16")
"""Begun by one process, which has kept a checkpoint after two steps."""


def step(number: int) -> list[Credited]:
    """Calls of four rollouts, some longer than others; one says nothing."""
    calls = [
        credited(
            (1, 2, 3 + number + rollout, *range(4, 4 + rollout)),
            (5, 6 + rollout, 7),
            advantage=(-1.0, 0.0, 0.5, 2.0)[rollout],
            rollout=f"{number}-{rollout}",
        )
        for rollout in range(4)
    ]
    return [replace(call, group=str(index % 2)) for index, call in enumerate(calls)]


def shaped(case: str, model: PreTrainedModel) -> None:
    """What the case puts into a model, before it is cut or as it is."""
    if case == "adapter":
        add_adapter(model, ADAPTER)
    if case == "bfloat16":
        checkpoint_layers(model)


def arguments(case: str) -> dict[str, Any]:
    return {
        "objective": Objective(**CASES[case]),
        "optimiser": OptimiserConfig(learning_rate=3e-3),
        "updating": lambda _: nullcontext(),
    }


def whole_model(case: str, folder: Path) -> PreTrainedModel:
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if case == "adapter":
        add_adapter(model, ADAPTER)
    return model


def train(learner: Learner, steps: Sequence[int]) -> list[dict[str, float]]:
    return [learner.learn(step(number)) for number in steps]


def in_two(ranks: Ranks, case: str, base: Path) -> Learner | None:
    """The learner of two processes in the first of them; None in the other, once it is done."""
    whole = whole_model(case, base) if ranks.first else None
    plan = Plan(
        dtype=torch.bfloat16 if case == "bfloat16" else torch.float32,
        shape=partial(shaped, case),
    )
    weights = Sharded(ranks, whole, AutoConfig.from_pretrained(base), plan)
    if ranks.first:
        return LeadingLearner(ranks, "policy", weights, **arguments(case))
    follow(ranks, {"policy": Learner(weights, **arguments(case))})
    return None


def kept(learner: Learner, metrics: list[dict[str, float]], target: Path) -> None:
    """What there is to compare, as files."""
    assert isinstance(learner.weights, Sharded)
    target.joinpath("metrics.json").write_text(json.dumps(metrics))
    assert learner.weights.whole is not None
    torch.save(learner.weights.whole.state_dict(), target / "after.pt")


def main(folder: Path) -> None:
    """Train every case for two steps, keep a checkpoint, and train for one more; then go on from
    the checkpoints of one process."""
    ranks = Ranks(torch.device("cpu"))
    for case in CASES:
        if learner := in_two(ranks, case, folder / "base"):
            target = folder / "two" / case
            target.mkdir(parents=True)
            metrics = train(learner, (0, 1))
            learner.save(target)
            if case == "everything":
                calls = [item.transition for item in step(2)]
                target.joinpath("kl.json").write_text(json.dumps(learner.kl(calls)))
            kept(learner, metrics + train(learner, (2,)), target)
            end(ranks, b"")
    for case in RESUMED:
        saved = folder / "one" / case
        if learner := in_two(ranks, case, saved):
            learner.load(saved)
            target = folder / "resumed" / case
            target.mkdir(parents=True)
            kept(learner, train(learner, (2,)), target)
            end(ranks, b"")
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
