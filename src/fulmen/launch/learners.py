"""The settings of training, made into one learner for each policy."""

from collections.abc import Sequence
from pathlib import Path

from fulmen.launch.critic import make_critic
from fulmen.launch.objective import make_objective
from fulmen.launch.policy import ServedPolicy, load_policy
from fulmen.learner.learner import Learner
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.schema.training import TrainConfig
from fulmen.trainer.learners import Learners, Trained


def make_learners(
    config: TrainConfig, policies: Sequence[ServedPolicy], checkpoint: Path | None
) -> Learners:
    """One on the weights of each engine, going on from a checkpoint if there is one.

    Raises:
        FulmenError: a function, a critic or a reference cannot be had.
    """
    learners = Learners(
        [
            Trained(
                policy.source.name,
                _learner(config, policy, resumed=checkpoint is not None),
                policy.loaded.tokenizer.save_pretrained,
                policy.source.place,
            )
            for policy in policies
        ]
    )
    if checkpoint is not None:
        learners.load(checkpoint)
        for policy in policies:
            with policy.engine.updating(learners.versions[policy.source.name]):
                """Only the version is new: the weights came with the model."""
    return learners


def _learner(config: TrainConfig, policy: ServedPolicy, *, resumed: bool) -> Learner:
    reference = None
    if config.kl_coefficient > 0 and resumed:
        # The model that training began with, not the checkpoint.
        reference = load_policy(policy.source.model, config).model
    optimiser = OptimiserConfig(
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        schedule=config.schedule,
        total_steps=config.steps * config.updates_per_step,
        max_grad_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
        beta2=config.adam_beta2,
    )
    return Learner(
        policy.loaded.model,
        objective=make_objective(config),
        optimiser=optimiser,
        updating=policy.engine.updating,
        grammars=policy.grammars,
        reference=reference,
        critic=make_critic(config, policy.loaded, optimiser, base=policy.source.model),
    )
