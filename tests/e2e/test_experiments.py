"""The paper's three experiments, each in its framework, for one step: who is seen and trained."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from batches import batches
from fulmen.credit.trajectory import assemble
from fulmen.engine.pytorch.attention import prepare
from fulmen.launch.train import train
from fulmen.learner.logprobs import score
from fulmen.schema.config import make_config
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Credited, RolloutResult
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store

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


def recorded(run: Path) -> list[Credited]:
    """The calls of the run's only step, as sampled; advantages of both signs."""

    async def read() -> list[RolloutResult]:
        store = open_store(run / "run.db")
        try:
            (step,) = await store.steps()
            return await store.results(step.consumed)
        finally:
            await store.close()

    calls = [
        transition
        for result in asyncio.run(read())
        for transition in assemble(result, 0.0)[0].transitions
    ]
    return [
        Credited(transition=call, advantage=(-1.0) ** place * (1 + place % 3))
        for place, call in enumerate(calls)
    ]


def assert_a_tree_trains_what_its_calls_would_alone(name: str, run: Path) -> None:
    """Loss and gradient of a real step's calls, merged, beside each call through the plain model;
    and engine and learner agree on every recorded token."""
    items = recorded(run)
    model = AutoModelForCausalLM.from_pretrained(EXAMPLES / name / "base", dtype=torch.float32)
    model.eval()
    want = 0.0
    for item in items:
        prompt, completion = item.transition.prompt_ids, item.transition.completion_ids
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
        loss = item.advantage * torch.log_softmax(logits, -1)[rows, torch.tensor(completion)].sum()
        loss.backward()
        want += loss.item()
    alone = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    prepare(model)
    got, positions = 0.0, 0
    for batch in batches(items):
        scores = score(model, batch)
        torch.testing.assert_close(scores.logprobs.detach(), batch.logprobs, atol=1e-4, rtol=0)
        loss = (batch.advantages * scores.logprobs).sum()
        loss.backward()
        got += loss.item()
        positions += batch.positions
    merged = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert got == pytest.approx(want, rel=1e-5)
    assert float((merged - alone).norm() / alone.norm()) < 1e-5
    repeated = sum(len(i.transition.prompt_ids + i.transition.completion_ids) for i in items)
    assert positions < 0.5 * repeated


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
    assert_a_tree_trains_what_its_calls_would_alone("sql", tmp_path / "run")


def test_rag_s_searches_are_seen_with_their_outcome(tmp_path, monkeypatch):
    rules = str(EXAMPLES / "rag" / "air.toml")
    step = one_step(recipe("rag", tmp_path, monkeypatch), tmp_path / "run", air=rules)
    assert {"reward/air/empty_result", "reward/air/repeated_call"} <= set(step)
    assert step["agent/rag/calls"] == 16 * step["collect/calls_per_rollout"]
    assert step["tools/ok"] > 0
    assert step.get("tools/unknown", 0.0) == 0.0
    assert step["collect/drifted_calls"] == 0.0
    assert {"reward/part/f1", "reward/part/format"} <= set(step)
    assert_a_tree_trains_what_its_calls_would_alone("rag", tmp_path / "run")


def test_calc_s_agent_and_its_calculator_are_seen(tmp_path, monkeypatch):
    rules = str(EXAMPLES / "calc" / "air.toml")
    step = one_step(recipe("calc", tmp_path, monkeypatch), tmp_path / "run", air=rules)
    assert step["agent/calc/trained"] == 1.0
    assert_a_tree_trains_what_its_calls_would_alone("calc", tmp_path / "run")
    assert step["tools/ok"] > 0
    assert {"reward/air/calculator-error", "reward/air/repeated_call"} <= set(step)


def test_selecting_agents_that_are_not_there_ends_the_run_with_their_names(tmp_path, monkeypatch):
    settings = recipe("sql", tmp_path, monkeypatch)
    with pytest.raises(AgentError, match=r"train = 'wirter' selects no call .*checker.*writer"):
        one_step(settings, tmp_path / "run", train="wirter")
