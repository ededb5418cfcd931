"""The schedule: ask, wait, judge, credit, learn, publish; then again.

Synchronous: the weights never change while agents work, so every token of a step was sampled by
one version of its policy.
"""

import asyncio
import math
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from msgspec import structs

from fulmen.schema.records import StepRecord, Task
from fulmen.schema.training import TrainConfig
from fulmen.store.base import Store
from fulmen.trainer.collect import Collector, Stopwatch
from fulmen.trainer.crediting import NO_SCORERS, Crediting, Scorers, credit_step
from fulmen.trainer.evaluation import measure
from fulmen.trainer.events import EvalDone, Listener, Progress, StepDone
from fulmen.trainer.folder import RunFolder
from fulmen.trainer.grading import Graded
from fulmen.trainer.health import hacking_notes, refuse_hopeless, refuse_unselected, step_notes
from fulmen.trainer.learners import Learners
from fulmen.trainer.rollouts import groups_of
from fulmen.trainer.sampling import collect_step
from fulmen.trainer.statistics import rollout_metrics
from fulmen.trainer.tasks import task_order


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop works with; it knows their promises, not how they are made."""

    config: TrainConfig
    folder: RunFolder
    store: Store
    collector: Collector
    learners: Learners
    crediting: Crediting
    train_tasks: Sequence[Task]
    val_tasks: Sequence[Task]
    listen: Listener
    stop: threading.Event
    """Set: finish this step, keep a checkpoint, and end."""
    scorers: Scorers = NO_SCORERS


@dataclass(slots=True)
class History:
    """What a run has been through, earlier processes of it included."""

    evals: list[EvalDone] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Mean training reward per step; NaN where no rollout had one."""
    intermediate: list[float] = field(default_factory=list)
    """Mean intermediate reward of a rollout per step."""
    last_eval: list[Graded] = field(default_factory=list)
    """The rollouts of the latest greedy evaluation."""
    step: int = 0
    drawn: int = 0
    """Tasks taken from the order by the steps so far."""
    checkpoint: Path | None = None
    seconds: float = 0.0
    """Spent in steps and the evaluations between them, all processes of the run together."""


async def run_steps(parts: Parts, history: History) -> None:
    """Train from `history.step` to the last step of the settings, and measure at both ends."""
    config = parts.config
    parts.scorers.check(parts.crediting)
    if history.step == 0:
        await _evaluate(parts, history, sampled=True)
    before, watch = history.seconds, Stopwatch()
    tasks = islice(task_order(parts.train_tasks, config.seed), history.drawn, None)
    while history.step < config.steps and not parts.stop.is_set():
        record = await _step(parts, history, tasks)
        history.seconds = before + watch.seconds
        await _commit(parts, history, record)
        if _evaluation_due(config, history.step):
            await _evaluate(parts, history, sampled=False)
            history.seconds = before + watch.seconds
    if history.step == config.steps:
        await _evaluate(parts, history, sampled=True)
    elif history.step and history.checkpoint != parts.folder.checkpoint(history.step):
        # Told to stop when the last step was on record already, without its weights.
        await parts.store.add_checkpoint(history.step, await _checkpoint(parts, history))
        parts.folder.prune_checkpoints(config.keep_checkpoints)


def _evaluation_due(config: TrainConfig, step: int) -> bool:
    """Between the ends, which are measured anyway."""
    return config.eval_every > 0 and step % config.eval_every == 0 and step < config.steps


async def _step(parts: Parts, history: History, tasks: Iterator[Task]) -> StepRecord:
    """One turn of the loop: the weights change, nothing is on disk yet."""
    config, step, watch = parts.config, history.step + 1, Stopwatch()
    graded = await collect_step(parts.collector, config, step, tasks, parts.crediting)
    if step == 1 and not parts.val_tasks:
        refuse_hopeless(graded)
    metrics = rollout_metrics(graded, watch.seconds)
    # In a thread, so that heartbeats and the display go on meanwhile.
    done = await asyncio.to_thread(credit_step, graded, parts.crediting, parts.scorers)
    if step == 1 and config.train:
        refuse_unselected(done.metrics, config.train)
    await parts.store.add_rewards(done.rewards)
    for note in done.notes:
        parts.listen(note)
    parts.listen(Progress(phase="learn", step=step, done=0, total=1))
    learned = await asyncio.to_thread(parts.learners.learn, done.credited)
    consumed = tuple(item.result.rollout.id for item in graded)
    history.step = step
    history.drawn += groups_of(consumed)
    history.rewards.append(metrics.get("reward/mean", math.nan))
    history.intermediate.append(done.metrics.get("reward/intermediate", 0.0))
    return StepRecord(
        step=step,
        version=parts.learners.version,
        versions=parts.learners.versions,
        consumed=consumed,
        metrics=metrics | done.metrics | learned | {"time/step_s": watch.seconds},
    )


async def _commit(parts: Parts, history: History, record: StepRecord) -> None:
    """Checkpoint if due, then record the step and what it consumed."""
    config, step, metrics = parts.config, record.step, record.metrics
    if step % config.checkpoint_every == 0 or step == config.steps or parts.stop.is_set():
        record = structs.replace(record, checkpoint=await _checkpoint(parts, history))
    await parts.store.commit_step(structs.replace(record, finished=time.time()))
    parts.folder.append_metrics({"step": step, "seconds": history.seconds, **metrics})
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


async def _evaluate(parts: Parts, history: History, *, sampled: bool) -> None:
    if not parts.val_tasks:
        return
    for temperature in (0.0, parts.config.temperature) if sampled else (0.0,):
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
        history.evals.append(done)
        parts.folder.append_metrics({"eval": done.mode, **structs.asdict(done)})


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
