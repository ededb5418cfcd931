"""Automatic intermediate rewarding: rules over what happened become small, capped rewards.

An agent's final reward says little about which of twenty calls was good. What its tools did says
more, and is known without asking anybody.

Source: Agent Lightning, arXiv 2508.03680 (the idea; the rules are ours).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from fulmen.credit.detect import DETECTORS, Given, Hit, Predicate
from fulmen.credit.observe import Observed
from fulmen.credit.rules import Rule
from fulmen.schema.records import Reward


def apply_rules(
    rules: Sequence[Rule],
    observed: Observed,
    predicates: Mapping[str, Predicate] | None = None,
) -> list[Reward]:
    """The rewards that an attempt earns by the rules: one for each rule and earner.

    A tool that no call asked for (an agent's own code used it) earns a call nothing; rules with
    `target = "agent"` or `"rollout"` see it.

    Args:
        rules: with different names.
        observed: the attempt.
        predicates: the functions of `predicate` rules, by their `function`.

    Raises:
        GraderError: a user's function raised, or returned no finite number.

    >>> from fulmen.schema.records import ToolUse
    >>> use = ToolUse(name="add", outcome="error", call_id="c1", agent="solver")
    >>> seen = Observed("r", 1, (), (use, use, use))
    >>> [r.value for r in apply_rules([Rule(when="tool_failed", weight=-0.5, cap=1.0)], seen)]
    [-1.0]
    """
    return [reward for rule in rules for reward in _apply(rule, observed, predicates or {})]


def _apply(rule: Rule, observed: Observed, predicates: Mapping[str, Predicate]) -> Iterator[Reward]:
    given = Given(rule, observed, predicates.get(rule.function or ""))
    earned: dict[tuple[str | None, str | None], float] = {}
    for hit in DETECTORS[rule.when](given):
        if not _is_meant(rule, hit) or (rule.earner == "call" and hit.call_id is None):
            continue
        key = (
            hit.call_id if rule.earner == "call" else None,
            (hit.agent or None) if rule.earner == "agent" else None,
        )
        earned[key] = earned.get(key, 0.0) + rule.weight * hit.strength
    scale = _within(rule.cap, math.fsum(earned.values()))
    for (call_id, agent), value in earned.items():
        if value:
            yield Reward(
                rollout_id=observed.rollout_id,
                attempt=observed.attempt,
                name=rule.reward_name,
                value=value * scale,
                source="rule",
                call_id=call_id,
                agent=agent,
            )


def _is_meant(rule: Rule, hit: Hit) -> bool:
    return all(
        pattern is None or fnmatchcase(name or "", pattern)
        for pattern, name in ((rule.tool, hit.tool), (rule.agent, hit.agent))
    )


def _within(cap: float | None, total: float) -> float:
    """What all rewards of a rule are multiplied with, so that their sum keeps to the cap.

    >>> _within(1.0, -4.0), _within(1.0, 0.5), _within(None, 9.0)
    (0.25, 1.0, 1.0)
    """
    if cap is None or abs(total) <= cap:
        return 1.0
    return cap / abs(total)
