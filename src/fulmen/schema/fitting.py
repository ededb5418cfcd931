"""Which settings of training go together: what would be ignored or contradicts itself is refused.

A setting counts as chosen where it is neither its default nor what the algorithm's name stands for:
the effective settings that a run writes down can be given to the next one as they are.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fulmen.schema.presets import PRESETS

GROUP_ADVANTAGES = ("grpo", "group-mean", "rloo", "maxrl")
"""They compare the rollouts of a group with each other."""
CRITIC_ADVANTAGES = ("gae", "turn-gae")

CORRECTION_BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "truncate": (0.0, 2.0),
        "truncate-call": (0.0, 5.0),
        "mask": (0.5, 5.0),
        "mask-call": (0.99, 1.01),
        "mask-call-k3": (0.0, 0.01),
    }
)
"""The usual lower and upper bound of each correction; with 0 it has no lower one."""

Values = Mapping[str, Any]


class Need(NamedTuple):
    """Settings that are ignored unless one of others has one of its values; none: any but None,
    False and 0."""

    settings: tuple[str, ...]
    one_of: Mapping[str, tuple[object, ...]]


class Contradiction(NamedTuple):
    """Values that cannot go together, and what is said then."""

    found: Callable[[Values], bool]
    text: str


_LOW = tuple(name for name, (low, _) in CORRECTION_BOUNDS.items() if low)

NEEDS = (
    Need(("task_kind",), {"whitening": ("task",)}),
    Need(("discount",), {"credit": ("discounted", "turn-group"), "advantage": ("turn-gae",)}),
    Need(("token_discount",), {"credit": ("token-discounted",), "advantage": ("gae",)}),
    Need(("turn_weight",), {"credit": ("turn-group",)}),
    Need(("overlong_buffer", "overlong_penalty"), {"overlong_tokens": ()}),
    Need(("max_groups_factor",), {"dynamic_sampling": ()}),
    Need(("clip_low", "clip_high"), {"loss": ("clip", "gspo", "cispo")}),
    Need(("dual_clip",), {"loss": ("clip",)}),
    Need(("constant_tokens",), {"normaliser": ("constant",)}),
    Need(("correction_low",), {"correction": _LOW}),
    Need(("correction_high",), {"correction": tuple(CORRECTION_BOUNDS)}),
    Need(
        ("gae_lambda", "critic", "critic_model", "critic_learning_rate", "value_clip"),
        {"advantage": CRITIC_ADVANTAGES},
    ),
    Need(("critic_model",), {"critic": ("own",)}),
    Need(("value_coefficient",), {"critic": ("shared",)}),
    Need(("kl_estimator",), {"kl_coefficient": ()}),
    Need(("kl_estimator",), {"kl_in_reward": (False,)}),
    Need(("lora_alpha", "lora_targets"), {"lora_rank": ()}),
    Need(("agent_error_reward",), {"on_agent_error": ("penalise",)}),
)

CONTRADICTIONS = (
    Contradiction(
        lambda v: v["group_size"] == 1 and v["advantage"] in GROUP_ADVANTAGES,
        "group_size is 1 and advantage {advantage!r} compares the rollouts of a group; make it 2 "
        "or more, or take batch-mean, none or gae",
    ),
    Contradiction(
        lambda v: v["group_size"] == 1 and v["dynamic_sampling"],
        "dynamic_sampling looks for groups that differ; group_size is 1",
    ),
    Contradiction(
        lambda v: (
            v["dynamic_sampling"] and v["advantage"] in (*CRITIC_ADVANTAGES, "batch-mean", "none")
        ),
        "dynamic_sampling leaves out groups that score alike, and with advantage {advantage!r} "
        "these teach as much as others; switch it off, or take grpo, group-mean, rloo or maxrl",
    ),
    Contradiction(
        lambda v: v["advantage"] in CRITIC_ADVANTAGES and v["credit"] != "identical",
        "credit {credit!r} does not go with advantage {advantage!r}, where the critic tells which "
        "call earned what",
    ),
    Contradiction(
        lambda v: v["loss"] == "reinforce" and v["epochs"] > 1,
        "epochs is {epochs}, and loss 'reinforce' has nothing that holds the policy near the one "
        "that sampled; make it 1, or take loss clip, gspo or cispo",
    ),
    Contradiction(
        lambda v: v["whitening"] == "task" and v["task_kind"] is None,
        "whitening 'task' needs task_kind, a key of the tasks' metadata",
    ),
    Contradiction(
        lambda v: v["overlong_buffer"] > (v["overlong_tokens"] or v["overlong_buffer"]),
        "overlong_buffer is {overlong_buffer}, more than overlong_tokens, of which it is the last "
        "part",
    ),
    Contradiction(
        lambda v: v["correction"] != "none" and v["old_logprobs"] == "engine",
        "a correction is for the gap between engine and learner, and with old_logprobs 'engine' "
        "there is none to see; set old_logprobs to 'learner'",
    ),
    Contradiction(
        lambda v: v["low"] > v["high"],
        "correction {correction!r} from {low:g} to {high:g} leaves no token; correction_low must "
        "be below correction_high",
    ),
    Contradiction(
        lambda v: v["kl_in_reward"] and v["kl_coefficient"] == 0,
        "kl_in_reward needs a kl_coefficient above 0",
    ),
    Contradiction(
        lambda v: v["warmup_steps"] >= v["steps"] and "warmup_steps" in v["chosen"],
        "warmup_steps is {warmup_steps} and steps {steps}: the learning rate would never be what "
        "it is set to",
    ),
)


def misfits(values: Values, defaults: Values) -> Iterator[str]:
    """What is wrong with settings as a whole, a sentence each.

    Args:
        values: of all settings.
        defaults: of all settings that have one.

    >>> from fulmen.schema.training import TrainConfig
    >>> usual = dict(TrainConfig(agent="a", tasks="t", model="m"))
    >>> list(misfits(usual | {"dual_clip": 3.0, "loss": "gspo"}, usual))
    ["dual_clip is ignored unless loss is 'clip'"]
    """
    preset = PRESETS.get(values["algorithm"] or "", {})
    chosen = {n for n, v in values.items() if v != defaults.get(n) and v != preset.get(n)}
    for need in NEEDS:
        if not any(_is(values[name], wanted) for name, wanted in need.one_of.items()):
            for name in sorted(chosen & set(need.settings)):
                yield f"{name} is ignored unless {_condition(need)}"
    low, high = correction_bounds(
        values["correction"], values["correction_low"], values["correction_high"]
    )
    told = {**values, "chosen": chosen, "low": low, "high": high}
    for found, text in CONTRADICTIONS:
        if found(told):
            yield text.format_map(told)


def correction_bounds(name: str, low: float | None, high: float | None) -> tuple[float, float]:
    """Those of a correction: what is set, else the usual ones.

    >>> correction_bounds("mask", None, 3.0)
    (0.5, 3.0)
    """
    lower, upper = CORRECTION_BOUNDS.get(name, (0.0, math.inf))
    return lower if low is None or not lower else low, upper if high is None else high


def _is(value: object, wanted: tuple[object, ...]) -> bool:
    return value in wanted if wanted else bool(value)


def _condition(need: Need) -> str:
    """
    >>> _condition(Need(("discount",), {"credit": ("discounted", "last"), "steps": ()}))
    "credit is 'discounted' or 'last', or steps is set"
    """
    return ", or ".join(
        f"{name} is " + (" or ".join(map(repr, wanted)) or "set")
        for name, wanted in need.one_of.items()
    )
