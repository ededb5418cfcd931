"""The paper's three experiments, each in its framework, for one step: who is seen and trained."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from fulmen.launch.train import train
from fulmen.schema.config import make_config
from fulmen.schema.errors import AgentError
from fulmen.schema.training import TrainConfig

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def _modules_of_one_example():
    """Examples have modules of the same names: none is left from or for another test."""
    names = {path.stem for path in EXAMPLES.glob("*/*.py")}
    before = {name: sys.modules.pop(name) for name in names & set(sys.modules)}
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def recipe(name: str, folder: Path, monkeypatch) -> dict[str, object]:
    """The settings of an experiment, its tasks made in `folder`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES / name), *sys.path])
    location = importlib.util.spec_from_file_location("recipe", EXAMPLES / name / "recipe.py")
    assert location is not None
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    module.prepare()
    return module.recipe()


def one_step(settings: dict[str, object], out: Path, **changes: object) -> dict[str, float]:
    """Metrics of a step of 4 tasks by 4 rollouts."""
    few = {"steps": 1, "tasks-per-step": 4, "group-size": 4, "workers": 8, "out": str(out)}
    values = {k.replace("-", "_"): v for k, v in (settings | few | changes).items() if k != "val"}
    values = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
    train(make_config(TrainConfig, values), listen=lambda _: None)
    (line,) = (out / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)


def test_sql_trains_the_writer_and_the_rewriter_and_leaves_the_checker(tmp_path, monkeypatch):
    rules = str(EXAMPLES / "sql" / "air.toml")
    step = one_step(recipe("sql", tmp_path, monkeypatch), tmp_path / "run", air=rules)
    assert step["reward/air/no-sql"] <= 0.0
    agents = {name.split("/")[1] for name in step if name.startswith("agent/")}
    assert {"writer", "checker"} <= agents <= {"writer", "checker", "rewriter"}
    assert (step["agent/writer/calls"], step["agent/writer/trained"]) == (16.0, 1.0)
    assert step["agent/checker/trained"] == 0.0
    assert step["agent/checker/calls"] >= 16.0
    assert step["collect/excluded"] == 0.0


def test_rag_s_searches_are_seen_with_their_outcome(tmp_path, monkeypatch):
    rules = str(EXAMPLES / "rag" / "air.toml")
    step = one_step(recipe("rag", tmp_path, monkeypatch), tmp_path / "run", air=rules)
    assert {"reward/air/empty_result", "reward/air/repeated_call"} <= set(step)
    assert step["agent/rag/calls"] == 16 * step["collect/calls_per_rollout"]
    assert step["tools/ok"] > 0
    assert step.get("tools/unknown", 0.0) == 0.0
    assert step["collect/drifted_calls"] == 0.0
    assert {"reward/part/f1", "reward/part/format"} <= set(step)


def test_calc_s_agent_and_its_calculator_are_seen(tmp_path, monkeypatch):
    rules = str(EXAMPLES / "calc" / "air.toml")
    step = one_step(recipe("calc", tmp_path, monkeypatch), tmp_path / "run", air=rules)
    assert step["agent/calc/trained"] == 1.0
    assert step["tools/ok"] > 0
    assert {"reward/air/calculator-error", "reward/air/repeated_call"} <= set(step)


def test_selecting_agents_that_are_not_there_ends_the_run_with_their_names(tmp_path, monkeypatch):
    settings = recipe("sql", tmp_path, monkeypatch)
    with pytest.raises(AgentError, match=r"train = 'wirter' selects no call .*checker.*writer"):
        one_step(settings, tmp_path / "run", train="wirter")
