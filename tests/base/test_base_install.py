"""Run where only the base is installed, without PyTorch: `tests/base.sh`."""

import asyncio
import importlib.util
import json
import subprocess
import sys

import pytest

import fulmen
from fulmen.credit.advantage import credit
from fulmen.credit.assign import example
from fulmen.schema.config import make_config
from fulmen.schema.records import Outcome, Rollout, Task
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store

HEAVY = ("torch", "transformers", "sqlalchemy", "starlette", "numpy")


def modules_after(code: str) -> list[str]:
    """Which heavy modules a fresh interpreter has loaded after running the code."""
    check = (
        f"{code}\nimport json, sys\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=True)
    return json.loads(done.stdout)


def test_importing_fulmen_loads_nothing_heavy():
    assert modules_after("import fulmen") == []


def test_the_command_line_answers_without_loading_anything_heavy():
    assert modules_after("import fulmen.cli.main") == []


def test_help_works_in_the_base_install():
    command = [sys.executable, "-m", "fulmen.cli.main", "train", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--agent" in done.stdout


def test_settings_credit_and_store_work_in_the_base_install(tmp_path):
    config = make_config(TrainConfig, {"agent": "a", "tasks": "t", "model": "m"})
    assert config.group_size == 8
    group = [example(reward, [("a", 0.0)]) for reward in (1.0, 0.0)]
    assert [item.advantage for item in credit(group)] == [1.0, -1.0]

    async def one_rollout():
        store = open_store(tmp_path / "run.db")
        await store.enqueue([Rollout(id="r", task=Task(id="t", input=1), group="g", step=1)])
        (lease,) = await store.claim("w")
        status = await store.finish(lease, Outcome(output=1))
        await store.close()
        return status

    assert asyncio.run(one_rollout()) == "succeeded"


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_training_without_pytorch_is_refused_in_one_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"q": 1}\n')
    arguments = ["--agent", "cat", "--tasks", "t.jsonl", "--model", "m"]
    done = subprocess.run(
        [sys.executable, "-m", "fulmen.cli.main", "train", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert 'pip install "fulmen[train]"' in done.stderr


def test_the_version_is_the_package_s():
    assert fulmen.__version__ == "0.1.0"
