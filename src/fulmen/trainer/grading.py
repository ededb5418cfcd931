"""From what an agent did to the reward of its rollout.

A grader is the user's function. It names what it needs (`task`, `output`, `messages`, `tools`,
`rollout`, `group`) and returns a bool, a number, a dict of numbers, or None: not applicable.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from fulmen.schema.config import nearest
from fulmen.schema.errors import GraderError
from fulmen.schema.records import JSON, Reward, RolloutResult
from fulmen.trainer.conversation import messages_of, tools_of
from fulmen.trainer.weights import MAIN, UNWEIGHTED, Weights

Grader = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class AgentErrors:
    """What an agent's own failure is worth."""

    policy: Literal["penalise", "exclude"] = "penalise"
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Graded:
    """A finished rollout with its reward, or the reason why it has none."""

    result: RolloutResult
    reward: float | None
    source: Literal["grader", "agent", "failure"] = "grader"
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named rewards of a dict."""
    excluded: str = ""
    """Why the rollout takes no part: `infrastructure`, `timeout`, `cancelled`, `agent`,
    `not_applicable`; empty if it does."""
    left_out: str = ""
    """Why it is not trained although it has a reward: `equal_rewards` in its group, which dynamic
    sampling replaced by another; empty if it is."""

    def rewards(self) -> list[Reward]:
        """As the store keeps them: the reward, and the named parts of a dict."""
        if self.reward is None:
            return []
        named = {MAIN: self.reward} | {n: v for n, v in self.parts.items() if n != MAIN}
        return [
            Reward(
                rollout_id=self.result.rollout.id,
                attempt=self.result.attempt,
                name=name,
                value=value,
                source=self.source,
            )
            for name, value in named.items()
        ]


_ARGUMENTS: Mapping[str, Callable[[RolloutResult, Sequence[RolloutResult]], Any]] = {
    "task": lambda result, _: result.rollout.task.for_grader(),
    "output": lambda result, _: result.outcome.output,
    "messages": lambda result, _: messages_of(result),
    "tools": lambda result, _: tools_of(messages_of(result)),
    "rollout": lambda result, _: result,
    "group": lambda _, group: list(group),
}


def check_grader(grader: Grader, name: str) -> tuple[str, ...]:
    """The arguments a grader asks for.

    Raises:
        GraderError: it needs an argument that does not exist.
    """
    wanted: list[str] = []
    for parameter in inspect.signature(grader).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in _ARGUMENTS:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise GraderError(
                f"grader {name} wants an argument {parameter.name!r}, which graders are not given",
                hint=nearest(parameter.name, _ARGUMENTS),
            )
    return tuple(wanted)


async def grade(
    results: Sequence[RolloutResult],
    grader: Grader | None,
    name: str,
    errors: AgentErrors = AgentErrors(),
    weights: Weights = UNWEIGHTED,
) -> list[Graded]:
    """Give every finished rollout its reward, in order.

    Sync graders run in threads, async ones on this loop, all rollouts side by side.

    Raises:
        GraderError: the grader raised, returned NaN or something that is no reward, or other named
            rewards than `weights` names.
    """
    groups: dict[str, list[RolloutResult]] = {}
    for result in results:
        groups.setdefault(result.rollout.group, []).append(result)
    wanted = check_grader(grader, name) if grader else ()

    async def one(result: RolloutResult) -> Graded:
        failure = result.outcome.failure
        if failure is not None:
            if failure == "agent" and errors.policy == "penalise":
                return Graded(result, errors.reward, "failure")
            return Graded(result, None, excluded=failure)
        if grader is None:
            return _own_reward(result, weights)
        group = groups[result.rollout.group]
        arguments = {key: _ARGUMENTS[key](result, group) for key in wanted}
        value = await _call(grader, arguments, name, result)
        return _graded(result, value, name, weights)

    return list(await asyncio.gather(*(one(result) for result in results)))


async def _call(
    grader: Grader, arguments: dict[str, Any], name: str, result: RolloutResult
) -> object:
    try:
        if inspect.iscoroutinefunction(grader):
            return await grader(**arguments)
        return await asyncio.to_thread(grader, **arguments)
    except Exception as error:
        raise GraderError(
            f"grader {name} raised {type(error).__name__}({str(error)[:200]!r}) "
            f"on task {result.rollout.task.id!r}",
            hint="mend the grader and resume; return None where it does not apply",
        ) from error


def _graded(result: RolloutResult, value: object, name: str, weights: Weights) -> Graded:
    if value is None:
        return Graded(result, None, excluded="not_applicable")
    task = result.rollout.task.id
    if isinstance(value, Mapping):
        if not value:
            raise GraderError(f"grader {name} returned an empty dict on task {task!r}")
        parts = {str(key): _number(item, f"{name}[{key!r}]", task) for key, item in value.items()}
        given = {reward.name for reward in result.rewards}
        weights.check(parts, given, f"grader {name}", task)
        return Graded(result, weights.combine(parts), parts=parts)
    return Graded(result, weights.combine({MAIN: _number(value, name, task)}))


def _number(value: object, name: str, task: str) -> float:
    # float() would also take a string such as "nan" or "1"; a grader that returns text is mistaken.
    if not isinstance(value, Real) or not math.isfinite(value):
        raise GraderError(
            f"grader {name} returned {value!r:.80} on task {task!r}",
            hint="return True or False, a finite number, a dict of them, or None",
        )
    return float(value)


def _own_reward(result: RolloutResult, weights: Weights) -> Graded:
    output: JSON = result.outcome.output
    if isinstance(output, bool | int | float) and math.isfinite(output):
        return Graded(result, weights.combine({MAIN: float(output)}), "agent")
    if output is None:
        return Graded(result, None, "agent", excluded="not_applicable")
    raise GraderError(
        f"the agent returned {str(output)[:80]!r} on task {result.rollout.task.id!r} "
        "and there is no grader",
        hint="give --grader file.py:function, or let the agent return its reward as a number",
    )
