"""The settings of the loss, made into what the learner minimises."""

from functools import partial
from typing import TypeVar

from fulmen.learner import corrections, kl, losses, normalisers
from fulmen.learner.objective import KlFunction, Objective
from fulmen.learner.terms import Correction, Normaliser, PolicyLossFunction
from fulmen.runner.agents import load_function
from fulmen.schema.fitting import correction_bounds
from fulmen.schema.training import LOSSES, TrainConfig

F = TypeVar("F")


def make_objective(config: TrainConfig) -> Objective:
    """Raises AgentError if a user's function cannot be imported."""
    return Objective(
        loss=_loss(config),
        every_call=config.loss not in LOSSES,
        normaliser=_normaliser(config),
        correction=_correction(config),
        old=config.old_logprobs,
        kl=_kl(config),
        kl_coefficient=0.0 if config.kl_in_reward else config.kl_coefficient,
        kl_in_reward=config.kl_in_reward,
        entropy_coefficient=config.entropy_coefficient,
        updates_per_step=config.updates_per_step,
        epochs=config.epochs,
        micro_batch_tokens=config.micro_batch_tokens,
        max_staleness=config.max_staleness,
    )


def _loss(config: TrainConfig) -> PolicyLossFunction:
    region = {"low": config.clip_low, "high": config.clip_high}
    match config.loss:
        case "clip":
            return partial(losses.clipped_surrogate, **region, dual=config.dual_clip)
        case "gspo":
            return partial(losses.gspo, **region)
        case "cispo":
            return partial(losses.cispo, **region)
        case "reinforce":
            return losses.reinforce
        case "supervised":
            return losses.supervised
        case target:
            return load_function(target, "loss")


def _normaliser(config: TrainConfig) -> Normaliser:
    match config.normaliser:
        case "token":
            return normalisers.token
        case "transition":
            return normalisers.transition
        case "rollout":
            return normalisers.rollout
        case "group":
            return normalisers.group
        case "constant":
            return partial(normalisers.constant, tokens=config.constant_tokens)
        case target:
            return load_function(target, "normaliser")


def _correction(config: TrainConfig) -> Correction | None:
    """Bounds that are not set are the usual ones of each correction."""
    low, high = correction_bounds(config.correction, config.correction_low, config.correction_high)
    match config.correction:
        case "none":
            return None
        case "truncate":
            return partial(corrections.truncate, high=high)
        case "truncate-call":
            return partial(corrections.truncate_call, high=high)
        case "mask":
            return partial(corrections.mask, low=low, high=high)
        case "mask-call":
            return partial(corrections.mask_call, low=low, high=high)
        case "mask-call-k3":
            return partial(corrections.mask_call_k3, limit=high)
        case target:
            return load_function(target, "correction")


def _kl(config: TrainConfig) -> KlFunction:
    return kl.k2 if config.kl_estimator == "k2" else kl.k3
