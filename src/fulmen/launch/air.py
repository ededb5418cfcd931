"""The rules of automatic intermediate rewarding, as a user lists them.

[[rule]]
when = "tool_failed"                # docs/credit.md has the table
weight = -0.2
cap = 0.4                           # of one rollout, in size; left out: none
tool = "calc*"                      # left out: every tool
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulmen.credit.detect import Predicate
from fulmen.credit.rules import Rule
from fulmen.runner.agents import load_function
from fulmen.schema.config import make_config
from fulmen.schema.errors import ConfigError


def read_rules(file: str | None) -> tuple[Rule, ...]:
    """Read rules from a TOML file (or JSON, as `fulmen.train` writes it); no file, no rules.

    Raises:
        ConfigError: the file or a rule is not there or not as it must be, by its number.
    """
    if file is None:
        return ()
    content = _read(file)
    for key in content:
        if key != "rule":
            raise ConfigError(f"{file}: there is no {key!r}", hint="write [[rule]] above each rule")
    tables = content.get("rule")
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{file}: holds no rule", hint="write [[rule]] above each rule")
    rules = tuple(
        _beside(file, _rule(table, f"{file}: rule {number}"))
        for number, table in enumerate(tables, start=1)
    )
    _check_names(rules, file)
    return rules


def load_predicates(rules: Sequence[Rule]) -> Mapping[str, Predicate]:
    """The functions of `predicate` rules, by the name they are given.

    Raises:
        AgentError: one cannot be imported.
    """
    return {
        rule.function: load_function(rule.function, f"rule {rule.reward_name!r}:")
        for rule in rules
        if rule.function is not None
    }


def _read(file: str) -> dict[str, Any]:
    try:
        text = Path(file).read_text(encoding="utf-8")
        return json.loads(text) if file.endswith(".json") else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file", hint="check --air") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid TOML ({error})") from None


def _rule(table: object, origin: str) -> Rule:
    if not isinstance(table, dict):
        raise ConfigError(f"{origin} must be a table", hint="write [[rule]] above its keys")
    return make_config(Rule, table, origin=origin, flags=False)


def _beside(file: str, rule: Rule) -> Rule:
    """A function's file is looked for beside the rules first, then where Fulmen was started."""
    source, _, name = (rule.function or "").rpartition(":")
    if source.endswith(".py") and (near := Path(file).parent / source).is_file():
        return rule.model_copy(update={"function": f"{near}:{name}"})
    return rule


def _check_names(rules: tuple[Rule, ...], file: str) -> None:
    seen: dict[str, int] = {}
    for number, rule in enumerate(rules, start=1):
        name = rule.reward_name
        if name in seen:
            raise ConfigError(
                f"{file}: rules {seen[name]} and {number} are both called {name!r}",
                hint="give each a name of its own",
            )
        seen[name] = number
