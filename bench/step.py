"""What a step of training costs, by who computes: `make bench-step`.

Calc-mini as `training.py` trains it, once with the agent over the standard library's HTTP and once
with the `openai` client, in turns. CPU seconds are the kernel's, between the ends of two steps: of
the agents' processes, of the model's, which samples and learns, of the server's first thread, which
is its event loop with the gateway, and of its other threads, most of them the store's. Linux only.
Some five minutes:

    python bench/step.py [--pairs 3]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from results import result
from training_runs import AGENT, AT_ONCE, EXAMPLE, RECIPE, as_installed

WARM, MEASURED = 6, 20
"""Steps before the clock starts, and while it runs."""
AGENTS = {"http": AGENT, "openai": f"{AGENT}_with_openai"}


class Seconds(NamedTuple):
    """Of one step, or since the start."""

    wall: float
    agents: float
    model: float
    event_loop: float
    threads: float

    def per_step(self, later: "Seconds") -> "Seconds":
        """What was spent until then, a step."""
        return Seconds(*((b - a) / MEASURED for a, b in zip(self, later, strict=True)))


def spent(server: psutil.Process) -> Seconds:
    """Since the processes began."""
    agents = model = 0.0
    for child in server.children(recursive=True):
        computes = "fulmen.launch.hosted" in child.cmdline()
        seconds = sum(child.cpu_times()[:2])
        agents, model = (agents, model + seconds) if computes else (agents + seconds, model)
    own = {thread.id: thread.user_time + thread.system_time for thread in server.threads()}
    loop = own.pop(server.pid)
    return Seconds(time.perf_counter(), agents, model, loop, sum(own.values()))


def train(agent: str, folder: Path) -> Seconds:
    """A step's, with this agent."""
    few = folder / "few.jsonl"
    few.write_text("".join((EXAMPLE / "val.jsonl").read_text().splitlines(keepends=True)[:16]))
    settings = RECIPE | {
        "agent": agent,
        "workers": AT_ONCE,
        "val": few,
        "eval-every": 0,
        "steps": WARM + MEASURED,
        "out": folder / "run",
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    line = [sys.executable, "-m", "fulmen.cli.main", "train", "--json", *flags, "--no-tracing"]
    with subprocess.Popen(line, env=as_installed(), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        server = psutil.Process(child.pid)
        marks = [spent(server) for step in ended(child.stdout) if step in (WARM, WARM + MEASURED)]
    if child.returncode:
        raise SystemExit(f"fulmen train ended with status {child.returncode}")
    before, after = marks
    return before.per_step(after)


def ended(lines: Iterator[str]) -> Iterator[int]:
    """The number of each step as it ends."""
    for line in lines:
        if line.startswith("{") and (event := json.loads(line))["type"] == "step_done":
            yield event["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step of training costs.")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each agent, in turns")
    pairs = parser.parse_args().pairs
    found: dict[str, list[Seconds]] = {name: [] for name in AGENTS}
    for _ in range(pairs):
        for name, agent in AGENTS.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(train(agent, Path(folder)))
                print(name, *(f"{k} {v:.3f}" for k, v in found[name][-1]._asdict().items()))
    for figure in Seconds._fields:
        http, openai = (
            statistics.median(getattr(one, figure) for one in found[name]) for name in AGENTS
        )
        result(
            f"step.{figure}",
            http,
            "s",
            peer="the same agent with the openai client",
            peer_value=openai,
            higher_is_better=False,
        )


if __name__ == "__main__":
    main()
