"""The schedule: ask, wait, judge, credit, learn, publish; then again.

Synchronous: the weights never change while agents work, so every token of a step was sampled by
one version of its policy.
"""

import asyncio
import math
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from msgspec import structs

from fulmen.schema.records import Rollout, StepRecord, Task
from fulmen.schema.training import TrainConfig
from fulmen.store.base import Store
from fulmen.trainer.ahead import Ahead
from fulmen.trainer.collect import Collector, Stopwatch
from fulmen.trainer.crediting import NO_SCORERS, Crediting, Scorers, credit_step
from fulmen.trainer.evaluation import measure
from fulmen.trainer.events import Listener, Progress, StepDone
from fulmen.trainer.folder import RunFolder
from fulmen.trainer.health import (
    failure_notes,
    hacking_notes,
    refuse_hopeless,
    refuse_unselected,
    step_notes,
)
from fulmen.trainer.history import History, eval_line, step_line
from fulmen.trainer.learners import Learning
from fulmen.trainer.retention import Retention
from fulmen.trainer.rollouts import train_rollouts
from fulmen.trainer.sampling import collect_step
from fulmen.trainer.statistics import rollout_metrics
from fulmen.trainer.tasks import Upcoming, task_order


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with; it knows their promises, not how they are made."""

    config: TrainConfig
    folder: RunFolder
    store: Store
    collector: Collector
    learners: Learning
    crediting: Crediting
    train_tasks: Sequence[Task]
    val_tasks: Sequence[Task]
    listen: Listener
    stop: threading.Event
    """Set: finish this step, keep a checkpoint, and end."""
    ahead: Ahead
    scorers: Scorers = NO_SCORERS


async def run_steps(parts: Parts, history: History) -> None:
    """Train from `history.step` to the last step of the settings, and measure at both ends."""
    config = parts.config
    parts.scorers.check(parts.crediting)
    parts.folder.prune_checkpoints(config.keep_checkpoints)
    retention = Retention(parts.folder, parts.store, config.keep_rollouts)
    before, watch = history.seconds + _measured(config, history), Stopwatch()
    await _evaluate(parts, history)
    if history.step == 0:
        watch = Stopwatch()  # what is measured before the first step is no part of training
    tasks = Upcoming(islice(task_order(parts.train_tasks, config.seed), history.drawn, None))
    while history.step < config.steps and not parts.stop.is_set():
        record = await _step(parts, history, tasks)
        record = structs.replace(record, seconds=before + watch.seconds)
        history.add(record)
        await _commit(parts, history, record)
        await retention.after(record.step)
        await _evaluate(parts, history)
        if history.step < config.steps:
            history.seconds = before + watch.seconds
    await parts.ahead.withdraw(history.step)
    if history.step and history.checkpoint != parts.folder.checkpoint(history.step):
        # Told to stop when the last step was on record already, without its weights.
        await parts.store.add_checkpoint(history.step, await _checkpoint(parts, history))
        parts.folder.prune_checkpoints(config.keep_checkpoints)


async def _step(parts: Parts, history: History, tasks: Upcoming) -> StepRecord:
    """One turn of the loop: the weights change, nothing is on disk yet."""
    config, step, watch = parts.config, history.step + 1, Stopwatch()
    graded = await collect_step(parts.collector, config, step, tasks, parts.crediting)
    if step == 1 and not parts.val_tasks:
        refuse_hopeless(graded)
    metrics = rollout_metrics(graded, watch.seconds)
    async with parts.ahead.asking(_next_rollouts(parts, step, tasks)):
        # In a thread, so that heartbeats and the display go on meanwhile.
        done = await asyncio.to_thread(credit_step, graded, parts.crediting, parts.scorers)
        if step == 1 and config.train:
            refuse_unselected(done.metrics, config.train)
        await parts.store.add_rewards(done.rewards)
        for note in (*done.notes, *failure_notes(graded)):
            parts.listen(note)
        parts.listen(Progress(phase="learn", step=step, done=0, total=1))
        learned = await asyncio.to_thread(parts.learners.learn, done.credited)
    versions = parts.learners.versions
    return StepRecord(
        step=step,
        version=next(iter(versions.values())),
        versions=versions,
        consumed=tuple(item.result.rollout.id for item in graded),
        metrics=metrics | done.metrics | learned | {"time/step_s": watch.seconds},
    )


def _next_rollouts(parts: Parts, step: int, tasks: Upcoming) -> list[Rollout]:
    """Those that the step after this one begins with; none if something else comes before it."""
    config = parts.config
    measured = parts.val_tasks and _due(config, step)
    if step == config.steps or measured or parts.stop.is_set():
        return []
    return train_rollouts(config, step + 1, tasks.peek(config.tasks_per_step))


async def _commit(parts: Parts, history: History, record: StepRecord) -> None:
    """Checkpoint if due, then record the step and what it consumed. With the record in the store
    the step is done, whatever comes after."""
    config, step, metrics = parts.config, record.step, record.metrics
    if step % config.checkpoint_every == 0 or step == config.steps or parts.stop.is_set():
        record = structs.replace(record, checkpoint=await _checkpoint(parts, history))
    await parts.store.commit_step(structs.replace(record, finished=time.time()))
    parts.folder.append_metrics(step_line(record))
    parts.folder.prune_checkpoints(config.keep_checkpoints)
    eta = (config.steps - step) * history.seconds / step
    parts.listen(StepDone(step=step, metrics=metrics, eta_s=eta))
    for note in (*step_notes(metrics), *hacking_notes(history.rewards, history.intermediate)):
        parts.listen(note)


async def _checkpoint(parts: Parts, history: History) -> str:
    """Save the weights as they are after the last step; the folder's name within the run."""
    parts.listen(Progress(phase="save", step=history.step, done=0, total=1))
    history.checkpoint = await asyncio.to_thread(_save, parts, history.step)
    return str(history.checkpoint.relative_to(parts.folder.path))


def _due(config: TrainConfig, step: int) -> tuple[float, ...]:
    """Temperatures at which the held-out tasks are measured after a step: greedy, and at both ends
    as in training, too."""
    if step in (0, config.steps):
        return 0.0, config.temperature
    return (0.0,) if config.eval_every > 0 and step % config.eval_every == 0 else ()


def _measured(config: TrainConfig, history: History) -> float:
    """Seconds of what was measured since the last step's end, where steps follow."""
    if not 0 < history.step < config.steps:
        return 0.0
    return math.fsum(done.seconds for done in history.evals if done.step == history.step)


async def _evaluate(parts: Parts, history: History) -> None:
    """Measure what is due after the last step.

    What an earlier process has measured comes from the store again, without any agent at work, and
    is not counted twice.
    """
    if not parts.val_tasks:
        return
    for temperature in _due(parts.config, history.step):
        done, graded = await measure(
            parts.collector,
            parts.config,
            parts.val_tasks,
            step=history.step,
            temperature=temperature,
        )
        if history.step == 0:
            refuse_hopeless(graded)
        if temperature == 0:
            history.last_eval = graded
        if not history.has(done):
            history.evals.append(done)
            parts.folder.append_metrics(eval_line(done))


def _save(parts: Parts, step: int) -> Path:
    """Write a checkpoint so that it is either there as a whole or not at all."""
    target = parts.folder.checkpoint(step)
    draft = target.with_name(target.name + ".new")
    for leftover in (draft, target):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir(parents=True)
    last = step == parts.config.steps or parts.stop.is_set()
    parts.learners.save(draft, final=last)
    draft.rename(target)
    return target
