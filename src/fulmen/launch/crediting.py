"""The settings of credit, made into what the trainer works with."""

import re
from collections.abc import Sequence

from fulmen.credit.assign import CreditRule, discounted, identical, last, per_agent, reward_to_go
from fulmen.credit.baselines import group_mean, grpo
from fulmen.credit.rules import Rule
from fulmen.credit.selection import Selector, by_name, every, patterns_of
from fulmen.credit.turns import TurnGroups
from fulmen.launch.air import load_predicates
from fulmen.runner.agents import load_function
from fulmen.schema.config import TrainConfig
from fulmen.schema.errors import ConfigError, GraderError
from fulmen.schema.records import Call
from fulmen.trainer.crediting import Crediting
from fulmen.trainer.weights import Weights


def make_crediting(config: TrainConfig, rules: Sequence[Rule], weights: Weights) -> Crediting:
    """Raises AgentError if a function cannot be imported, ConfigError if `train` names nobody."""
    patterns, selected = _selection(config.train)
    turns = None
    if config.credit == "turn-group":
        turns = TurnGroups(config.discount, config.turn_weight, config.scale_advantage)
    return Crediting(
        rule=_rule(config),
        turns=turns,
        baseline=grpo if config.scale_advantage else group_mean,
        rules=rules,
        predicates=load_predicates(rules),
        weights=weights,
        selected=selected,
        patterns=patterns,
    )


def _rule(config: TrainConfig) -> CreditRule:
    match config.credit:
        case "identical" | "turn-group":
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
