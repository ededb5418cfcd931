"""`fulmen train`, or its model's process, killed at random moments of every phase, and resumed: the
curve is the same."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fulmen.schema.config import make_config
from fulmen.schema.training import TrainConfig

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TIMED = ("seconds", "_per_s", "_s", "time/")
"""Metrics that measure the clock, which no seed repeats."""
PHASES = {  # when each kill may fall: the event that begins it, and how long it may wait, s
    "eval": ("progress", 0.2),
    "collect": ("progress", 0.4),
    "learn": ("progress", 0.4),
    "save": ("progress", 0.1),
    "committed": ("step_done", 0.02),
    "measured": ("eval_done", 0.02),
}


def command(calc: Path, out: Path, few: Path) -> list[str]:
    given = {
        "agent": f"{calc}/plain_agent.py:solve",
        "tasks": f"{calc}/train.jsonl",
        "val": str(few),
        "grader": f"{calc}/grader.py:score",
        "model": f"{calc}/base",
        "out": str(out),
        "steps": 4,
        "tasks_per_step": 2,
        "group_size": 3,
        "learning_rate": 1e-3,
        "max_tokens": 32,
        "workers": 1,
        "eval_every": 2,
        "checkpoint_every": 2,
        "keep_checkpoints": 1,
        "keep_rollouts": 1,
        "seed": 5,
    }
    make_config(TrainConfig, given)  # complains here, not in the process
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return [sys.executable, "-m", "fulmen.cli.main", "train", "--json", *flags]


def record(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMED)}
        for line in lines
    ]


def phase_of(event: dict[str, Any]) -> str:
    ends = {"step_done": "committed", "eval_done": "measured"}
    return ends.get(event["type"]) or event.get("phase", "")


def kill_the_run(process: psutil.Process) -> None:
    process.kill()


def kill_the_model(process: psutil.Process) -> None:
    """The process that computes, as the kernel does when memory runs out."""
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "fulmen.launch.hosted" in child.cmdline():
                child.kill()


def killed_in(
    phase: str,
    arguments: list[str],
    chance: random.Random,
    kill: Callable[[psutil.Process], None],
) -> int:
    """Run until some moment of the phase and kill; the exit status, 0 if that came too late."""
    after, times = chance.uniform(0, PHASES[phase][1]), chance.randint(1, 2)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        bomb = threading.Timer(after, kill, [psutil.Process(process.pid)])
        seen = 0
        for line in process.stdout:
            seen += phase_of(json.loads(line)) == phase
            if seen == times and bomb.ident is None:
                bomb.start()
    bomb.cancel()
    return process.returncode


@pytest.fixture(scope="module")
def few(calc, tmp_path_factory) -> Path:
    """Held-out tasks."""
    file = tmp_path_factory.mktemp("few") / "few.jsonl"
    file.write_text("".join((calc / "val.jsonl").read_text().splitlines(keepends=True)[:2]))
    return file


@pytest.fixture(scope="module")
def undisturbed(calc, few, tmp_path_factory) -> list[dict[str, Any]]:
    """The record of a run that nobody kills."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run(command(calc, out, few), check=True, stdout=subprocess.DEVNULL)
    return record(out)


@pytest.mark.parametrize(
    ("kill", "status", "phases"),
    [
        (kill_the_run, -signal.SIGKILL, ("collect", "learn", "save", "committed")),
        (kill_the_model, 1, ("eval", "collect", "learn", "save")),
    ],
)
def test_a_run_that_is_killed_in_every_phase_has_the_record_of_an_undisturbed_one(
    calc, tmp_path, few, undisturbed, kill, status, phases
):
    killed = tmp_path / "killed"
    chance, ends = random.Random(6), []
    for phase in phases:
        resume = ["--resume"] if killed.exists() else []
        ends.append(killed_in(phase, [*command(calc, killed, few), *resume], chance, kill))
    resumed = [*command(calc, killed, few), "--resume"]
    done = subprocess.run(resumed, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(ends) <= {0, status}
    assert ends.count(status) >= 3, "a kill may come after the run's end, but seldom does"
    assert record(killed) == undisturbed
