"""The learners of a run's policies, here and in the other processes that torchrun starts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fulmen.launch.learning import make_follower, make_learner
from fulmen.launch.loading import LoadedPolicy
from fulmen.launch.policy import policy_sources
from fulmen.learner.learner import Updating
from fulmen.learner.ranks import Ranks
from fulmen.learner.together import follow
from fulmen.schema.training import TrainConfig
from fulmen.trainer.learners import Learners, Trained


def make_learners(
    config: TrainConfig,
    policies: Sequence[LoadedPolicy],
    checkpoint: Path | None,
    ranks: Ranks | None,
    updating: Callable[[str], Updating],
) -> Learners:
    """One on the weights of each engine, going on from a checkpoint if there is one. `updating`
    gives that of the engine of a policy's name.

    Raises:
        FulmenError: a function, a critic or a reference cannot be had.
    """
    resumed = checkpoint is not None
    if ranks is not None:
        ranks.broadcast(json.dumps({"resumed": resumed}).encode())
    learners = Learners(
        [
            Trained(
                policy.source.name,
                make_learner(
                    config, policy, ranks, updating=updating(policy.source.name), resumed=resumed
                ),
                policy.loaded.tokenizer.save_pretrained,
                policy.source.place,
            )
            for policy in policies
        ]
    )
    if checkpoint is not None:
        learners.load(checkpoint)
        for policy in policies:
            name = policy.source.name
            with updating(name)(learners.versions[name]):
                """Only the version is new: the weights came with the model."""
    return learners


def follow_run(config: TrainConfig, ranks: Ranks) -> bytes:
    """Be one of the other processes until the run ends; returns the outcome that the first gives.

    Raises:
        EngineError: the first process has ended without a word.
    """
    resumed = json.loads(ranks.broadcast())["resumed"]
    learners = {
        source.name: make_follower(config, source, ranks, resumed=resumed)
        for source in policy_sources(config)
    }
    return follow(ranks, learners)
