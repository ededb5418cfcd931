"""Ask for rollouts, wait for their ends, and score them as they come in."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fulmen.runner.pool import Counters
from fulmen.schema.records import Rollout, RolloutResult
from fulmen.store.base import Store
from fulmen.trainer.events import Listener, Progress
from fulmen.trainer.grading import AgentErrors, Graded, Grader, check_grader, grade
from fulmen.trainer.weights import UNWEIGHTED, Weights

_GATHER_S = 0.25
"""The first rollouts to end wait so long for their neighbours: one query for many instead of one
each. When fewer are out the wait is shorter in proportion, so that nobody waits behind the last."""


@dataclass(frozen=True, slots=True)
class Judge:
    """The user's grader and what an agent's own failure is worth."""

    grader: Grader | None
    name: str
    errors: AgentErrors
    weights: Weights = UNWEIGHTED

    @property
    def needs_whole_groups(self) -> bool:
        """A grader that compares rollouts can only run when all of a group are there."""
        return self.grader is not None and "group" in check_grader(self.grader, self.name)


class Agents(Protocol):
    """Those at work on the store's queue."""

    @property
    def counters(self) -> Counters:
        """What they have done."""
        ...

    async def broken(self) -> None:
        """Wait for what stops them, and raise it; else wait for ever."""
        ...


@dataclass(frozen=True, slots=True)
class Collector:
    """Turns rollouts into graded results through a store that a pool of agents works on."""

    store: Store
    pool: Agents
    judge: Judge
    listen: Listener
    export: Callable[[Sequence[RolloutResult]], None] = lambda _: None
    """Shown every finished rollout."""

    async def collect(
        self, rollouts: Sequence[Rollout], phase: Literal["eval", "collect"], step: int
    ) -> list[Graded]:
        """Enqueue the rollouts and return them, graded and in order, when all have ended.

        Raises:
            AgentError: the agent cannot be run at all.
            GraderError: the grader raised or returned something that is no reward.
        """
        await self.store.enqueue(rollouts)
        order = [rollout.id for rollout in rollouts]
        graded: dict[str, Graded] = {}
        pending = set(order)
        held: list[str] = []
        while pending:
            finished = await self._next(sorted(pending), _GATHER_S * len(pending) / len(order))
            pending.difference_update(finished)
            held += finished
            if pending and self.judge.needs_whole_groups:
                self._report(phase, step, graded, len(order), len(order) - len(pending))
                continue
            for item in await self._grade(held):
                graded[item.result.rollout.id] = item
            held.clear()
            self._report(phase, step, graded, len(order), len(order) - len(pending))
        return [graded[name] for name in order]

    async def _next(self, pending: Sequence[str], gather_s: float) -> list[str]:
        """Ids that have ended, up to so long after the first; raises what stopped the pool."""
        waiting = asyncio.ensure_future(self.store.wait_finished(pending))
        broken = asyncio.ensure_future(self.pool.broken())
        try:
            await asyncio.wait({waiting, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()
            first = await waiting
            if len(first) < len(pending):
                await asyncio.wait({broken}, timeout=gather_s)
            return await self.store.wait_finished(pending, timeout_s=0)
        finally:
            waiting.cancel()
            broken.cancel()

    async def _grade(self, ids: Sequence[str]) -> list[Graded]:
        judge = self.judge
        results = await self.store.results(ids)
        self.export(results)
        graded = await grade(results, judge.grader, judge.name, judge.errors, judge.weights)
        await self.store.add_rewards([reward for item in graded for reward in item.rewards()])
        return graded

    def _report(
        self,
        phase: Literal["eval", "collect"],
        step: int,
        graded: dict[str, Graded],
        total: int,
        done: int,
    ) -> None:
        rewards = [item.reward for item in graded.values() if item.reward is not None]
        state = self.pool.counters
        self.listen(
            Progress(
                phase=phase,
                step=step,
                done=done,
                total=total,
                running=state.running,
                failed=sum(bool(item.result.outcome.failure) for item in graded.values()),
                retried=sum(item.result.retries for item in graded.values()),
                reward=math.fsum(rewards) / len(rewards) if rewards else None,
            )
        )


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._start = clock, clock()

    @property
    def seconds(self) -> float:
        """Never 0, so that it may divide."""
        return max(1e-9, self._clock() - self._start)
