"""The runs that `training.py` compares: how each is started, and what it cost by the step."""

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulmen.schema.records import Task

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "calc"
sys.path.append(str(EXAMPLE.parent))

from calc.recipe import recipe

RECIPE = recipe()
AGENT = f"{HERE / 'training_agent.py'}:solve"
AT_ONCE = 128
"""Agents: all rollouts of a step."""
_OURS_TO_SET = ("OMP_", "MALLOC_", "MKL_", "KMP_", "GOMP_", "TOKENIZERS_")
"""What a user who only installs a package has not set."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every run of a comparison shares."""

    folder: Path
    """Of all its runs."""
    tasks: Sequence[Task]
    """In the order in which training asks for them."""
    steps: int
    """Where the schedule ends."""
    every: int
    """Steps between checkpoints."""
    seed: int
    target: float
    """Held-out greedy success that ends the clock."""
    cap_s: float
    """A run that has not got there by then is ended."""
    val: Path
    """Tasks that checkpoints are measured on."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of training as its trainer saw it."""

    step: int
    seconds: float
    """From the first step's start to this one's end, without waiting for evaluations."""
    taken: float
    """By this step alone."""
    collect_s: float
    """Of which: rollouts with their tools and rewards."""
    sampled: int
    """Tokens."""
    transitions: int
    """Tokens of all calls, each with its whole context, as in `learner.py`."""
    reward: float
    """Mean of the rollouts."""


@dataclass(slots=True)
class Run:
    """A training run and the held-out success of its checkpoints."""

    name: str
    steps: list[Step] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)

    def reached(self, target: float) -> float | None:
        """Seconds of training of the first checkpoint that is good enough; None if none is."""
        seconds = {each.step: each.seconds for each in self.steps}
        found = [step for step in sorted(self.held_out) if self.held_out[step] >= target]
        return seconds[found[0]] if found else None

    def promising(self, step: int, target: float) -> bool:
        """Whether a checkpoint is worth measuring: greedy success of `target` was never seen where
        the rollouts of the last steps earned less than half as much."""
        last = [each.reward for each in self.steps if step - 5 < each.step <= step]
        return statistics.fmean(last) >= target / 2

    def sample_rate(self) -> float:
        """Sampled tokens per second of collecting; the first step warms up."""
        return sum(s.sampled for s in self.steps[1:]) / sum(s.collect_s for s in self.steps[1:])

    def learn_rate(self) -> float:
        """Tokens of all calls per second of all that is not collecting."""
        later = self.steps[1:]
        return sum(s.transitions for s in later) / sum(s.taken - s.collect_s for s in later)

    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(s.taken for s in self.steps[1:]) / len(self.steps[1:])


def as_installed() -> dict[str, str]:
    """This process's environment without anything that tunes threads or memory."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_OURS_TO_SET)}


def tuned(threads: int) -> dict[str, str]:
    """The same with what Fulmen sets for itself (`engine/platform.py`), in glibc's own words."""
    return as_installed() | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "MALLOC_TOP_PAD_": str(64 * 2**20),
    }


# Fulmen


def fulmen(plan: Plan, name: str = "fulmen", steps: int = 0) -> Run:
    """`fulmen train` with the demo's settings, to the last step; then its checkpoints in turn. Or
    for so many steps, untested. The agent has no framework, and nobody watches its tools: TRL's has
    neither.

    It measures a few held-out tasks before the first step, as the demo does, and so begins with
    its workers started; TRL begins with everything imported, too.
    """
    out = plan.folder / name
    few = plan.folder / "few.jsonl"
    few.write_text("".join(plan.val.read_text().splitlines(keepends=True)[:16]))
    settings = RECIPE | {
        "agent": AGENT,
        "workers": AT_ONCE,
        "val": few,
        "eval-every": 0,
        "steps": steps or plan.steps,
        "seed": plan.seed,
        "checkpoint-every": steps or plan.every,
        "keep-checkpoints": plan.steps,
        "out": out,
    }
    _fulmen("train", settings, plan.cap_s, "--no-tracing")
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    run = Run(name, _from_metrics([line for line in lines if "eval" not in line]))
    for step in run.steps if not steps else ():
        folder = out / "checkpoints" / f"step-{step.step:06d}"
        wanted = run.reached(plan.target) is None and run.promising(step.step, plan.target)
        if folder.is_dir() and wanted:
            run.held_out[step.step] = held_out(plan, folder)
    return run


def _from_metrics(lines: Sequence[dict[str, Any]]) -> list[Step]:
    ends = [0.0, *(line["seconds"] for line in lines)]
    return [
        Step(
            step=line["step"],
            seconds=line["seconds"],
            taken=line["seconds"] - before,
            collect_s=line["collect/seconds"],
            sampled=int(line["learn/sampled_tokens"]),
            transitions=int(line["learn/transition_tokens"]),
            reward=line["reward/mean"],
        )
        for before, line in zip(ends, lines, strict=False)
    ]


def held_out(plan: Plan, model: Path) -> float:
    """Greedy success of a checkpoint, whoever trained it, by `fulmen eval`."""
    kept = ("agent", "grader", "workers", "max-tokens")
    settings = {key: RECIPE[key] for key in kept} | {
        "tasks": plan.val,
        "model": model,
        "out": plan.folder / "eval" / "-".join(model.relative_to(plan.folder).parts),
    }
    events = [json.loads(line) for line in _fulmen("eval", settings, 600.0)]
    return next(event["success"] for event in events if event["type"] == "eval_done")


def _fulmen(command: str, settings: Mapping[str, object], limit_s: float, *more: str) -> list[str]:
    """Run a command of ours to its end, or interrupt it; the JSON lines that it printed."""
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    line = [sys.executable, "-m", "fulmen.cli.main", command, "--json", *flags, *more]
    child = subprocess.Popen(line, env=as_installed(), stdout=subprocess.PIPE, text=True)
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)  # it finishes the step under way
        said, _ = child.communicate()
    else:
        if child.returncode:
            raise SystemExit(f"fulmen {command} ended with status {child.returncode}")
    return [line for line in said.splitlines() if line.startswith("{")]


# TRL


def trl(plan: Plan, name: str, python: str, environment: dict[str, str], steps: int = 0) -> Run:
    """TRL's trainer until a checkpoint is good enough, or the cap; or for so many steps, untested.

    Its process waits while a checkpoint is measured, and does not count that.
    """
    run = Run(name)
    with (plan.folder / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            [python, "-P", str(HERE / "training_trl.py"), _settings(plan, name, steps)],
            env={k: v for k, v in environment.items() if k != "PYTHONPATH"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            for text in child.stdout:
                line = json.loads(text)
                run.steps.append(_from_line(line))
                if line["checkpoint"] is not None:
                    answer = "end" if steps else _verdict(plan, run, Path(line["checkpoint"]))
                    child.stdin.write(answer + "\n")
                    child.stdin.flush()
        finally:
            child.stdin.close()  # it does not wait any more
            with suppress(subprocess.TimeoutExpired):
                child.wait(60)
            child.kill()
    if child.returncode or not run.steps:
        said = Path(log.name).read_text()[-2000:]
        raise SystemExit(f"{name} ended with status {child.returncode}:\n{said}")
    return run


def _verdict(plan: Plan, run: Run, checkpoint: Path) -> str:
    last = run.steps[-1]
    if run.promising(last.step, plan.target):
        run.held_out[last.step] = held_out(plan, checkpoint)
    done = run.reached(plan.target) is not None or last.seconds > plan.cap_s
    return "end" if done else "go"


def _settings(plan: Plan, name: str, steps: int) -> str:
    tasks = plan.folder / "ordered.jsonl"
    tasks.write_text("".join(json.dumps(task.for_grader()) + "\n" for task in plan.tasks))
    return json.dumps(
        {
            "example": str(EXAMPLE),
            "model": str(RECIPE["model"]),
            "tasks": str(tasks),
            "out": str(plan.folder / name),
            "steps": plan.steps,
            "tasks_per_step": RECIPE["tasks-per-step"],
            "group_size": RECIPE["group-size"],
            "updates": RECIPE.get("updates-per-step", 1),
            "learning_rate": RECIPE["learning-rate"],
            "entropy": RECIPE["entropy-coefficient"],
            "max_tokens": RECIPE["max-tokens"],
            "checkpoint_every": steps or plan.every,
            "seed": plan.seed,
        }
    )


def _from_line(line: dict[str, Any]) -> Step:
    return Step(
        step=line["step"],
        seconds=line["seconds"],
        taken=line["step_s"],
        collect_s=line["rollout_s"],
        sampled=line["sampled"],
        transitions=line["transitions"],
        reward=line["reward"],
    )
