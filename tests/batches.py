"""Credited calls as the learner lays them out."""

from collections.abc import Sequence

import torch

from fulmen.learner.batch import Layout, MicroBatch, lay_out
from fulmen.schema.records import Credited, Transition


def credited(
    prompt, completion, advantage=1.0, rollout="r", logprobs=None, temperature=1.0, **changes
) -> Credited:
    """A call of literal tokens."""
    values = {
        "rollout_id": rollout,
        "call_id": f"{rollout}-{len(prompt)}-{sum(completion)}",
        "agent": "agent",
        "prompt_ids": tuple(prompt),
        "completion_ids": tuple(completion),
        "logprobs": tuple(logprobs or [-3.0] * len(completion)),
        "temperature": temperature,
        "version": 0,
    }
    return Credited(advantage=advantage, transition=Transition(**(values | changes)))


def batches(
    items: Sequence[Credited], *, layout: Layout = "tree", max_tokens: int = 8192
) -> list[MicroBatch]:
    """Each token weighs 1."""
    return lay_out(
        items,
        [1.0] * len(items),
        layout=layout,
        max_tokens=max_tokens,
        device=torch.device("cpu"),
    )


def batch_of(items: Sequence[Credited], *, layout: Layout = "tree") -> MicroBatch:
    """All in one."""
    (batch,) = batches(items, layout=layout)
    return batch
