"""The settings of PPO's critic, made into one."""

from dataclasses import replace

from fulmen.engine.model import LoadedModel
from fulmen.engine.platform import place
from fulmen.launch.loading import load_policy
from fulmen.learner.critic import Critic, OwnCritic, SharedCritic
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.schema.errors import ConfigError
from fulmen.schema.fitting import CRITIC_ADVANTAGES
from fulmen.schema.training import TrainConfig


def make_critic(
    config: TrainConfig, policy: LoadedModel, optimiser: OptimiserConfig, *, base: str
) -> Critic | None:
    """The critic that the settings ask for, as it is before training; None: they need none.

    One on a model of its own begins with `base`, what the policy began with, if no other is named.

    Raises:
        ModelError: its model cannot be loaded.
        ConfigError: its model has other tokens than the policy, or there are several processes.
    """
    if config.advantage not in CRITIC_ADVANTAGES:
        return None
    if config.critic == "shared":
        if place()[1] > 1:
            raise ConfigError(
                "a shared critic is for one process, and torchrun has started several",
                hint="take --critic own",
            )
        return SharedCritic(
            policy.model,
            coefficient=config.value_coefficient,
            clip=config.value_clip,
            faster=_rate(config) / config.learning_rate,
        )
    loaded = load_policy(config.critic_model or base, config)
    if loaded.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"critic_model {config.critic_model!r} has another vocabulary than the policy",
            hint="take a model of the same family, or leave it out",
        )
    return OwnCritic(
        loaded.model,
        optimiser=replace(optimiser, learning_rate=_rate(config)),
        clip=config.value_clip,
        max_tokens=config.micro_batch_tokens,
    )


def _rate(config: TrainConfig) -> float:
    """A critic learns a number from the beginning, where the policy changes what it can already:
    usual are 1e-5 and 1e-6."""
    return config.critic_learning_rate or 10 * config.learning_rate
