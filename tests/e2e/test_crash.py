"""A run of each kind whose processes are killed; `make crash-test` kills more of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_loses_nothing_and_does_nothing_twice():
    done = subprocess.run(
        [sys.executable, "-m", "crash", "--rounds", "10"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    values = {one["name"]: one["value"] for one in map(json.loads, (x[7:] for x in lines))}
    for kind in ("postgresql", "http+sqlite", "http+postgresql"):
        assert values[f"crash.kills.{kind}"] >= 10
        assert values[f"crash.lost.{kind}"] == values[f"crash.duplicated.{kind}"] == 0
