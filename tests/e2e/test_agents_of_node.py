"""TypeScript agents: as commands and behind HTTP, they are trained as the Python function is."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from clients.run import find_node, node_environment
from fulmen.launch.train import train
from fulmen.schema.config import make_config
from fulmen.schema.records import RolloutResult
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TYPES_STRIPPED = (22, 18)
"""The first Node that runs TypeScript as it is."""


@pytest.fixture(scope="module")
def node() -> str:
    return find_node(TYPES_STRIPPED)[0]


@pytest.fixture(scope="module")
def folder(calc) -> Path:
    """The agents beside their packages."""
    made = node_environment(find_node(TYPES_STRIPPED)[1], "calc", calc / "node")
    for source in (calc / "node").glob("*.ts"):
        shutil.copy(source, made)
    return made


@pytest.fixture(scope="module")
def served(node, folder) -> Iterator[str]:
    """URL of the agent that is a server."""
    command = [node, str(folder / "http_agent.ts"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


def run(calc: Path, out: Path, agent: str, **changes: Any) -> list[dict[str, float]]:
    """Metrics of each step."""
    values: dict[str, Any] = {
        "agent": agent,
        "tasks": f"{calc}/train.jsonl",
        "grader": f"{calc}/grader.py:score",
        "model": f"{calc}/base",
        "out": str(out),
        "steps": 1,
        "tasks_per_step": 3,
        "group_size": 4,
        "learning_rate": 1e-3,
        "max_tokens": 48,
        "workers": 1,
        "seed": 5,
    }
    train(make_config(TrainConfig, values | changes), listen=lambda _: None)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def results(out: Path) -> list[RolloutResult]:
    async def read():
        store = open_store(out / "run.db")
        try:
            return await store.results(
                [f"000001-{t:04d}-{s:03d}" for t in range(3) for s in range(4)]
            )
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.fixture(scope="module")
def as_function(calc, tmp_path_factory) -> list[RolloutResult]:
    """What the Python function said, and was told."""
    out = tmp_path_factory.mktemp("function") / "run"
    run(calc, out, f"{calc}/plain_agent.py:solve")
    return results(out)


@pytest.mark.parametrize("kind", ["openai_agent.ts", "ai_agent.ts", "http_agent.ts"])
def test_an_agent_of_node_samples_the_same_tokens_as_the_python_function(
    calc, tmp_path, node, folder, served, as_function, kind
):
    agent = served if kind == "http_agent.ts" else f"{node} {folder / kind}"
    run(calc, tmp_path / "run", agent)
    assert max(len(result.calls) for result in as_function) > 1, "the tool was used"
    for function, other in zip(as_function, results(tmp_path / "run"), strict=True):
        assert other.outcome.output == function.outcome.output.strip()
        assert [(c.prompt_ids, c.completion_ids) for c in other.calls] == [
            (c.prompt_ids, c.completion_ids) for c in function.calls
        ]
        assert [c.drift for c in other.calls] == [None] * len(other.calls)


def test_a_served_agent_works_on_many_tasks_at_once_and_is_trained(calc, tmp_path, served):
    lines = run(calc, tmp_path / "run", served, steps=2, tasks_per_step=8, group_size=8, workers=32)
    assert [line["learn/updates"] for line in lines] == [1, 1]
    for line in lines:
        assert line["collect/rollouts"] == 64
        assert line["collect/agent_errors"] == line["collect/retries"] == 0
        assert line["collect/refused_calls"] == line["collect/excluded"] == 0


def test_the_calculator_of_node_says_what_python_s_says(calc_modules, node, folder):
    calculator = import_module("plain_agent").calculator

    tried = ["1/8", "3/8", "-1/8", "7/3", "2.675", "(1+2)*3", "2--3", "- - 3", ".5+1.", "1e3", "0"]
    tried += ["0*-1", "1_000", "00", "1/0", "7/0/*", "1e999", "9**9", "+3", "3 4", "007", "", "(1"]
    tried += ["1\n+2", "True", "9" * 61, "999999999*9999999", "x"]
    script = (
        'import { calculator } from "./calc.ts";'
        "console.log(JSON.stringify(JSON.parse(process.argv[1]).map(calculator)));"
    )
    command = [node, "--input-type=module", "--eval", script, json.dumps(tried)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [calculator(expression) for expression in tried]
