"""`fulmen train` killed at random moments of every phase, and resumed: the curve is the same."""

import json
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

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


def killed_in(phase: str, arguments: list[str], chance: random.Random) -> bool:
    """Run until some moment of the phase and kill the process; False if it came to its end."""
    after, times = chance.uniform(0, PHASES[phase][1]), chance.randint(1, 2)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        bomb = threading.Timer(after, process.kill)
        seen = 0
        for line in process.stdout:
            seen += phase_of(json.loads(line)) == phase
            if seen == times and bomb.ident is None:
                bomb.start()
    bomb.cancel()
    return process.returncode == -signal.SIGKILL


def test_a_run_that_is_killed_in_every_phase_has_the_record_of_an_undisturbed_one(calc, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join((calc / "val.jsonl").read_text().splitlines(keepends=True)[:2]))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(calc, whole, few), check=True, stdout=subprocess.DEVNULL)
    chance, kills = random.Random(6), 0
    for phase in ("collect", "learn", "save", "committed"):
        resume = ["--resume"] if killed.exists() else []
        kills += killed_in(phase, [*command(calc, killed, few), *resume], chance)
    resumed = [*command(calc, killed, few), "--resume"]
    done = subprocess.run(resumed, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert kills >= 3, "a kill may come after the run's end, but seldom does"
    assert record(killed) == record(whole)
