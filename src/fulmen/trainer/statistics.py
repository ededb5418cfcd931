"""Means with intervals, and the numbers of a step."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fulmen.trainer.grading import Graded

SUCCESS = 0.5
"""A rollout with at least this reward counts as a success."""


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % confidence interval.

    Rewards that are all 0 or 1 get Wilson's interval, which is honest at 0 % and 100 %; others the
    normal approximation. (0, 0, 0) for no values.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927).

    >>> [round(x, 2) for x in mean_interval([1.0] * 8 + [0.0] * 2)]
    [0.8, 0.49, 0.94]
    """
    n = len(values)
    if n == 0:
        return 0.0, 0.0, 0.0
    mean = math.fsum(values) / n
    z = 1.959964
    if all(value in (0.0, 1.0) for value in values):
        centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        # At 0 % and 100 % rounding could leave the mean outside its own interval.
        return mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
    half = z * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return mean, mean - half, mean + half


def success_rate(rewards: Sequence[float]) -> float:
    """Share of rewards of at least `SUCCESS`; 0 for none."""
    return sum(reward >= SUCCESS for reward in rewards) / len(rewards) if rewards else 0.0


def rollout_metrics(graded: Sequence[Graded], seconds: float) -> dict[str, float]:
    """What a set of finished rollouts looked like; rewards over those that have one."""
    counted = [item for item in graded if item.reward is not None]
    rewards = [item.reward for item in counted if item.reward is not None]
    asked = [call for item in graded for call in item.result.calls]
    calls = [call for call in asked if call.status < 400]
    sampled = [call for call in calls if call.prompt_ids]  # a model elsewhere tells no tokens
    metrics = {
        "collect/rollouts": float(len(graded)),
        "collect/groups": float(len({item.result.rollout.group for item in graded})),
        "collect/excluded": float(len(graded) - len(counted)),
        "collect/left_out": float(sum(bool(item.left_out) for item in graded)),
        "collect/agent_errors": float(sum(item.source == "failure" for item in graded)),
        "collect/retries": float(sum(item.result.retries for item in graded)),
        "collect/calls_per_rollout": len(calls) / len(graded) if graded else 0.0,
        "collect/refused_calls": float(len(asked) - len(calls)),
        "collect/drifted_calls": float(sum(call.drift is not None for call in calls)),
        "collect/superseded_calls": float(sum(call.superseded for call in calls)),
        "collect/truncated": _share([call.finish_reason == "length" for call in sampled]),
        "collect/prompt_tokens": _mean([len(call.prompt_ids) for call in sampled]),
        "collect/completion_tokens": _mean([len(call.completion_ids) for call in sampled]),
        "collect/sampled_tokens_per_s": sum(len(c.completion_ids) for c in calls) / seconds,
        "collect/seconds": seconds,
    }
    if rewards:
        metrics["reward/mean"] = math.fsum(rewards) / len(rewards)
        metrics["reward/success"] = success_rate(rewards)
    drifts = Counter(call.drift for call in calls if call.drift is not None)
    metrics |= {f"drift/{kind}": float(count) for kind, count in drifts.items()}
    return metrics | _parts(counted) | _reasons(graded)


def _parts(graded: Sequence[Graded]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for item in graded:
        for name, value in item.parts.items():
            values.setdefault(name, []).append(value)
    return {f"reward/part/{name}": _mean(found) for name, found in values.items()}


def _reasons(graded: Sequence[Graded]) -> dict[str, float]:
    """How many rollouts take no part or are not trained, for each reason."""
    excluded = Counter(item.excluded for item in graded if item.excluded)
    left_out = Counter(item.left_out for item in graded if item.left_out)
    return {f"excluded/{why}": float(n) for why, n in excluded.items()} | {
        f"left_out/{why}": float(n) for why, n in left_out.items()
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
