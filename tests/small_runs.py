"""Runs in this process with everything real but agents, gateway and model."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fulmen.launch.train import _history
from fulmen.learner.learner import Learner
from fulmen.runner.pool import Counters, Pool
from fulmen.schema.config import make_config
from fulmen.schema.records import Call, Credited, Outcome, StepRecord, Task, VersionSpan
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore
from fulmen.trainer.ahead import Ahead
from fulmen.trainer.collect import Collector, Judge
from fulmen.trainer.crediting import Crediting, Scorers
from fulmen.trainer.events import Event, StepDone
from fulmen.trainer.folder import open_folder
from fulmen.trainer.grading import AgentErrors
from fulmen.trainer.history import History
from fulmen.trainer.learners import Learners, Trained
from fulmen.trainer.loop import Parts, run_steps
from fulmen.trainer.tasks import task_order

TASKS = [Task(id=f"t{n}", input=n) for n in range(7)]
DULL = {"t1", "t2", "t5"}
"""Tasks on which every rollout scores the same."""


def score(task: Any, rollout: Any) -> float | None:
    """Rollouts of a dull task all win; of the others every second one does."""
    sample = int(rollout.rollout.id.rpartition("-")[2])
    return 1.0 if f"t{task}" in DULL else float(sample % 2)


CLOCK = ("seconds", "_per_s", "step_s")
"""Metrics that no seed repeats."""


def settings(**changes: Any) -> TrainConfig:
    values = {
        "agent": "a.py:f",
        "tasks": "t.jsonl",
        "model": "m",
        "steps": 4,
        "tasks_per_step": 3,
        "group_size": 2,
        "dynamic_sampling": True,
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
    }
    return make_config(TrainConfig, values | changes)


class AgentPool:
    """Agents that make one call each; the calls and ends are recorded as those of a real pool."""

    def __init__(self, store: SqlStore) -> None:
        self.counters, self._store = Counters(), store

    async def broken(self) -> None:
        await asyncio.Event().wait()

    async def work(self) -> None:
        # As a run does at its start: whoever had leases is gone with the process before.
        await self._store.expire_leases(now=float("inf"))
        while True:
            for lease in await self._store.claim("w", limit=4, wait_s=30.0):
                call = Call(
                    id=f"c-{lease.rollout.id}",
                    rollout_id=lease.rollout.id,
                    attempt=lease.attempt,
                    index=0,
                    protocol="chat",
                    prompt_ids=(1,),
                    completion_ids=(2, 3),
                    logprobs=(-0.5, -0.5),
                    versions=(VersionSpan(start=0, version=0),),
                    temperature=1.0,
                    top_p=1.0,
                    finish_reason="stop",
                )
                await self._store.record_calls([call])
                await self._store.finish(lease, Outcome(output="said"))


@dataclass
class NotingLearner:
    """Notes what it is given to learn."""

    version: int = 0
    given: list[list[Credited]] = field(default_factory=list)

    def learn(self, credited: list[Credited]) -> dict[str, float]:
        self.version += 1
        self.given.append(credited)
        return {}

    def save(self, folder: Path, *, final: bool) -> None:
        (folder / "version").write_text(f"{self.version}{' final' if final else ''}")


@contextlib.asynccontextmanager
async def collecting(
    folder: Path, grader: Callable[..., Any], events: list[Event]
) -> AsyncIterator[tuple[SqlStore, Collector]]:
    store = open_store(folder / "run.db")
    # As a real run does when it begins: whoever worked on it before is gone.
    await store.expire_leases(now=float("inf"))
    pool = AgentPool(store)
    working = asyncio.create_task(pool.work())
    judge = Judge(grader, "g.py:score", AgentErrors())
    try:
        yield store, Collector(store, cast(Pool, pool), judge, events.append)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await store.close()


@dataclass
class Run:
    learner: NotingLearner
    events: list[Event]
    steps: list[StepRecord]
    history: History

    @property
    def tasks(self) -> list[list[str]]:
        """Names of the tasks asked in each step, in order."""
        order = [task.id for task, _ in zip(task_order(TASKS, 0), range(200), strict=False)]
        counts = [len(record.consumed) // 2 for record in self.steps]
        return [order[sum(counts[:n]) : sum(counts[: n + 1])] for n in range(len(counts))]


async def train(
    path: Path,
    config: TrainConfig,
    *,
    resume: bool = False,
    grader: Callable[..., Any] = score,
    stop_after: int | None = None,
    crediting: Crediting | None = None,
    scorers: Scorers | None = None,
    val: Sequence[Task] = (),
    change: Callable[[Parts], None] = lambda _: None,
) -> Run:
    """A run in this process; `change` may change its parts before it begins."""
    folder, _ = open_folder(str(path), "run", "resume" if resume else "fail")
    stop, events, learner = threading.Event(), [], NotingLearner()

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepDone) and event.step == stop_after:
            stop.set()

    with folder:
        history = await _history(folder, None) if resume else History()
        learner.version = history.step
        async with collecting(path, grader, events) as (store, collector):
            parts = Parts(
                config=config,
                folder=folder,
                store=store,
                collector=collector,
                learners=Learners([Trained("", cast(Learner, learner), lambda _: None)]),
                crediting=crediting or Crediting(),
                train_tasks=TASKS,
                val_tasks=val,
                listen=listen,
                stop=stop,
                ahead=Ahead(store, contextlib.nullcontext),
                **({"scorers": scorers} if scorers else {}),
            )
            change(parts)
            await run_steps(parts, history)
            steps = await store.steps()
    return Run(learner, events, steps, history)


def shape(run: Run) -> list[tuple[int, tuple[str, ...], dict[str, float]]]:
    """Everything of a run's record that no clock measures."""
    return [
        (
            record.step,
            record.consumed,
            {k: v for k, v in record.metrics.items() if not k.endswith(CLOCK)},
        )
        for record in run.steps
    ]


def first_tasks(count: int) -> list[str]:
    return [task.id for task, _ in zip(task_order(TASKS, 0), range(count), strict=False)]


class PowerCut(Exception):
    """Stands for the end of the process: nothing of the run goes on after it."""


class Fuse:
    """Blows at the `last`-th thing that a run writes; never if that is 0."""

    def __init__(self, last: int = 0) -> None:
        self.spent, self._last = 0, last

    def spend(self) -> None:
        self.spent += 1
        if self.spent == self._last:
            raise PowerCut

    def guard(self, parts: Parts) -> None:
        """Put the fuse behind everything that the loop and its collector write."""
        for name in ("enqueue", "add_rewards", "commit_step", "add_checkpoint"):
            setattr(parts.store, name, self._waited_for(getattr(parts.store, name)))
        for owner, name in (
            (parts.learners, "learn"),
            (parts.learners, "save"),
            (parts.folder, "append_metrics"),
            (parts.folder, "prune_checkpoints"),
        ):
            setattr(owner, name, self._called(getattr(owner, name)))

    def _called(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def then_spend(*arguments: Any, **keywords: Any) -> Any:
            result = write(*arguments, **keywords)
            self.spend()
            return result

        return then_spend

    def _waited_for(self, write: Callable[..., Any]) -> Callable[..., Any]:
        async def then_spend(*arguments: Any, **keywords: Any) -> Any:
            result = await write(*arguments, **keywords)
            self.spend()
            return result

        return then_spend
