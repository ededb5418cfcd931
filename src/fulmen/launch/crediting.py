"""The settings of credit, made into what the trainer works with."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from fulmen.credit.assign import CreditRule, discounted, identical, last, per_agent, reward_to_go
from fulmen.credit.baselines import (
    Baseline,
    Centred,
    Numbers,
    batch_mean,
    group_mean,
    grpo,
    maxrl,
    no_baseline,
    rloo,
)
from fulmen.credit.critic import GAE
from fulmen.credit.overlong import Overlong
from fulmen.credit.rules import Rule
from fulmen.credit.selection import Selector, by_name, every, patterns_of
from fulmen.credit.tokens import discounted_tokens
from fulmen.credit.turns import TurnGroups
from fulmen.credit.whitening import Whitening, as_it_is, over_batch, over_kinds
from fulmen.launch.air import load_predicates
from fulmen.runner.agents import load_function
from fulmen.schema.errors import ConfigError, GraderError
from fulmen.schema.fitting import CRITIC_ADVANTAGES
from fulmen.schema.records import Call
from fulmen.schema.training import TrainConfig
from fulmen.trainer.crediting import Crediting, Scorers
from fulmen.trainer.learners import Learning
from fulmen.trainer.weights import Weights

_BASELINES: Mapping[str, Baseline] = {
    "grpo": grpo,
    "group-mean": group_mean,
    "rloo": rloo,
    "maxrl": maxrl,
    "batch-mean": batch_mean,
    "none": no_baseline,
}
_WHITENINGS: Mapping[str, Whitening] = {
    "none": as_it_is,
    "batch": over_batch,
    "task": over_kinds,
}


def make_crediting(config: TrainConfig, rules: Sequence[Rule], weights: Weights) -> Crediting:
    """Raises AgentError if a function cannot be imported, ConfigError if `train` names nobody."""
    patterns, selected = _selection(config.train)
    return Crediting(
        rule=_rule(config),
        baseline=_baseline(config.advantage),
        turns=_turns(config),
        tokens=(
            discounted_tokens(config.token_discount)
            if config.credit == "token-discounted"
            else None
        ),
        whitening=_WHITENINGS[config.whitening],
        critic=_critic(config),
        kl_coefficient=config.kl_coefficient if config.kl_in_reward else 0.0,
        overlong=_overlong(config),
        task_kind=config.task_kind,
        rules=rules,
        predicates=load_predicates(rules),
        weights=weights,
        selected=selected,
        patterns=patterns,
    )


def make_scorers(config: TrainConfig, learners: Learning) -> Scorers:
    """What crediting asks of the learners."""
    return Scorers(
        values=learners.values if config.advantage in CRITIC_ADVANTAGES else None,
        kl=learners.kl if config.kl_in_reward else None,
    )


def _baseline(name: str) -> Baseline:
    # Critics are given rewards as they are.
    if name in CRITIC_ADVANTAGES:
        return no_baseline
    return _BASELINES.get(name) or _by_own_function(name)


def _by_own_function(target: str) -> Baseline:
    """A user's `function(rewards, groups)`: an array of advantages, or that and one of units."""
    function = load_function(target, "advantage")

    def baseline(rewards: Numbers, groups: Sequence[str]) -> Centred:
        try:
            given = function(rewards.copy(), list(groups))
            values, units = given if isinstance(given, tuple) else (given, np.ones_like(rewards))
            return Centred(np.asarray(values, dtype=float), np.asarray(units, dtype=float))
        except Exception as error:
            reason = f"{type(error).__name__}({str(error)[:200]!r})"
            raise GraderError(f"advantage {target} raised {reason}") from error

    return baseline


def _turns(config: TrainConfig) -> TurnGroups | None:
    if config.credit != "turn-group":
        return None
    # Both parts of GiGPO have the same divisor: the deviation, or none.
    return TurnGroups(config.discount, config.turn_weight, scale=config.advantage == "grpo")


def _critic(config: TrainConfig) -> GAE | None:
    match config.advantage:
        case "gae":
            return GAE(config.token_discount, config.gae_lambda, "token")
        case "turn-gae":
            return GAE(config.discount, config.gae_lambda, "turn")
        case _:
            return None


def _overlong(config: TrainConfig) -> Overlong | None:
    if config.overlong_tokens is None:
        return None
    return Overlong(config.overlong_tokens, config.overlong_buffer, config.overlong_penalty)


def _rule(config: TrainConfig) -> CreditRule:
    match config.credit:
        case "identical" | "turn-group" | "token-discounted":
            return identical
        case "last":
            return last
        case "discounted":
            return discounted(config.discount)
        case "reward-to-go":
            return reward_to_go
        case "per-agent":
            return per_agent


def _selection(text: str | None) -> tuple[Sequence[str], Selector]:
    if text is None:
        return (), every
    if re.search(r"\.py:\w+$", text):
        return (), _by_function(text)
    patterns = patterns_of(text)
    if not patterns:
        raise ConfigError("train names no agent", hint="give names with commas, or leave it out")
    return patterns, by_name(patterns)


def _by_function(target: str) -> Selector:
    function = load_function(target, "train")

    def selected(call: Call) -> bool:
        try:
            return bool(function(call))
        except Exception as error:
            reason = f"{type(error).__name__}({str(error)[:200]!r})"
            raise GraderError(f"train {target} raised {reason} on call {call.id}") from error

    return selected
