"""Each part of an algorithm matters: the same lessons without it lead to other weights."""

import copy
from collections.abc import Sequence

import pytest
import torch

from bandits import Training, config, tiny_policy, uneven_rollouts
from fulmen.schema.presets import PRESETS

OTHER = {
    "advantage": {
        "grpo": "rloo",
        "group-mean": "grpo",
        "rloo": "grpo",
        "none": "group-mean",
        "batch-mean": "group-mean",
        "gae": "turn-gae",
        "turn-gae": "gae",
    },
    "credit": {"reward-to-go": "identical", "turn-group": "identical"},
    "whitening": {"batch": "none"},
    "loss": {
        "clip": "reinforce",
        "gspo": "clip",
        "cispo": "reinforce",
        "reinforce": "supervised",
        "supervised": "reinforce",
    },
    "normaliser": {
        "token": "rollout",
        "rollout": "token",
        "transition": "token",
        "constant": "rollout",
    },
    "clip_low": {0.2: 0.9, 3e-4: 0.2, 1.0: 0.1},
    "clip_high": {0.2: 5.0, 0.28: 5.0, 4e-4: 0.28},
    "kl_coefficient": {0.04: 0.0, 0.01: 0.0, 0.05: 0.0},
    "kl_estimator": {"k3": "k2", "k2": "k3"},
    "kl_in_reward": {True: False},
    "discount": {1.0: 0.5, 0.95: 0.5},
    "turn_weight": {1.0: 0.0},
    "old_logprobs": {"learner": "engine"},
}
"""What stands in the place of each value of a preset: the term dropped, or another one."""

PARTS = [
    (name, part)
    for name, preset in PRESETS.items()
    for part in preset
    if part != "dynamic_sampling"  # no matter of the learner: tests/unit/test_sampling.py
]


def weights_after(rollouts: Sequence[list], **settings) -> list[torch.Tensor]:
    """Two steps of two updates, held to a reference that is far away."""
    policy, reference = tiny_policy(), tiny_policy(seed=1)
    for weight in reference.parameters():
        weight.data.mul_(4.0)
    training = Training(config(updates_per_step=2, **settings), policy, reference)
    for step in rollouts:
        training.step(step)
    return [copy.deepcopy(weight.detach()) for weight in policy.parameters()]


@pytest.fixture(scope="module")
def rollouts() -> list[list]:
    return [uneven_rollouts(tiny_policy(), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def trained(rollouts) -> dict[str, list[torch.Tensor]]:
    return {name: weights_after(rollouts, algorithm=name) for name in PRESETS}


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_part_of_an_algorithm_changes_what_is_learned(name, part, rollouts, trained):
    instead = {part: OTHER[part][PRESETS[name][part]]}
    if part == "kl_coefficient" and PRESETS[name].get("kl_in_reward"):
        instead["kl_in_reward"] = False
    assert apart(trained[name], weights_after(rollouts, algorithm=name, **instead)) > 1e-4


def test_the_same_algorithm_learns_the_same(rollouts, trained):
    assert apart(trained["grpo"], weights_after(rollouts, algorithm="grpo")) == 0


def test_no_two_algorithms_are_the_same(trained):
    names = list(trained)
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            assert apart(trained[one], trained[other]) > 1e-4, (one, other)
