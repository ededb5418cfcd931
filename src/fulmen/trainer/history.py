"""What a run has been through, and where it stands after an interruption.

The store is the truth about steps: a step is there as a whole, with what it consumed and its line
of metrics.jsonl, or not at all. The file is the truth about evaluations: one that has no line is
due again, and its rollouts are in the store.
"""

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import convert, structs

from fulmen.schema.errors import ConfigError
from fulmen.schema.records import JSON, StepRecord
from fulmen.store.base import Store
from fulmen.trainer.events import EvalDone
from fulmen.trainer.folder import RunFolder
from fulmen.trainer.grading import Graded
from fulmen.trainer.rollouts import groups_of


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

    def add(self, record: StepRecord) -> None:
        """Count a step."""
        self.step, self.seconds = record.step, record.seconds
        self.drawn += groups_of(record.consumed)
        self.rewards.append(record.metrics.get("reward/mean", math.nan))
        self.intermediate.append(record.metrics.get("reward/intermediate", 0.0))

    def has(self, done: EvalDone) -> bool:
        """Whether an evaluation is counted already."""
        return any((one.step, one.mode) == (done.step, done.mode) for one in self.evals)


def step_line(record: StepRecord) -> dict[str, JSON]:
    """A step as metrics.jsonl has it."""
    return {"step": record.step, "seconds": record.seconds, **record.metrics}


def eval_line(done: EvalDone) -> dict[str, JSON]:
    """An evaluation as metrics.jsonl has it."""
    return {"eval": done.mode, **structs.asdict(done)}


def saved_steps(folder: RunFolder, records: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps that a run can go back to: those on record whose checkpoint is there."""
    return [r for r in records if r.checkpoint and (folder.path / r.checkpoint).is_dir()]


async def go_on(folder: RunFolder, store: Store) -> History:
    """Put a run back to its last checkpoint: what came after is forgotten, and asked again.

    Safe to repeat, if this is interrupted as well.

    Raises:
        ConfigError: all its checkpoints were taken away; nothing is forgotten then.
    """
    records = await store.steps()
    saved = saved_steps(folder, records)
    if not saved and any(record.checkpoint for record in records):
        raise ConfigError(
            f"{folder.path} has no checkpoint of its {len(records)} steps any more",
            hint="put one back into checkpoints/, or begin another run",
        )
    step = saved[-1].step if saved else 0
    await store.discard_after(step)
    # A checkpoint may be there whose step is not on record.
    for orphan in folder.checkpoints.glob("step-*"):
        if orphan.name > folder.checkpoint(step).name:
            shutil.rmtree(orphan)
    history = History()
    kept = [record for record in records if record.step <= step]
    for record in kept:
        history.add(record)
    for done in _evals(folder.read_metrics()):
        if done.step <= step and not history.has(done):
            history.evals.append(done)
    folder.write_metrics(_lines(kept, history.evals))
    if saved:
        history.checkpoint = folder.path / str(saved[-1].checkpoint)
    return history


def _evals(lines: Iterable[dict[str, JSON]]) -> list[EvalDone]:
    values = [{k: v for k, v in line.items() if k != "eval"} for line in lines if "eval" in line]
    return [convert(one | {"type": "eval_done"}, EvalDone) for one in values]


def _lines(records: Sequence[StepRecord], evals: Sequence[EvalDone]) -> list[dict[str, JSON]]:
    """Of metrics.jsonl: each step, and after it what was measured then."""
    lines = [eval_line(done) for done in evals if done.step == 0]
    for record in records:
        lines.append(step_line(record))
        lines += [eval_line(done) for done in evals if done.step == record.step]
    return lines
