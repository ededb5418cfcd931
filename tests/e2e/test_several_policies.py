"""Agents with policies of their own: served, trained and kept together in one process."""

import asyncio
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulmen.cli.report import closing_lines
from fulmen.engine.model import LoadedModel, load_model
from fulmen.launch.api import evaluate
from fulmen.launch.host_orders import HostPlan
from fulmen.launch.learners import make_learners
from fulmen.launch.learning import base_of, serve_trained
from fulmen.launch.loading import serve_in_groups
from fulmen.launch.policy import policy_sources
from fulmen.launch.train import train
from fulmen.schema.config import make_config
from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Call
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store
from fulmen.trainer.events import Event, Progress, RunFinished, RunStarted
from models import tiny_model

pytestmark = pytest.mark.e2e

AGENT = """
import os, httpx

def ask(agent, question):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-fulmen-agent": agent}
    body = {"model": "any", "messages": [{"role": "user", "content": question}], "max_tokens": 6}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=100)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]

def solve(task):
    return "".join(ask(agent, task["question"]) for agent in ("writer", "checker", "rewriter"))
"""
GRADER = "def score(rollout):\n    return int(rollout.rollout.id[-1]) % 2\n"
EQUAL = "def score():\n    return 1\n"
RULE = '[[rule]]\nwhen = "predicate"\nfunction = "{file}:by_chance"\nagent = "writer"\nweight = 1\n'
CHANCE = "def by_chance(call, tools):\n    return call.completion_ids[0] % 2 - 0.5\n"
POLICIES = {"writer": "writer", "re*": "re%2A"}
"""Policies and the names of their folders."""


@pytest.fixture(scope="module")
def random_model(calc, tmp_path_factory) -> Path:
    """A model folder whose weights know nothing."""
    folder = tmp_path_factory.mktemp("models") / "random"
    tokenizer = AutoTokenizer.from_pretrained(calc / "base")
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(calc: Path, folder: Path, random_model: Path, **changes: Any) -> TrainConfig:
    (folder / "agent.py").write_text(AGENT)
    (folder / "grader.py").write_text(GRADER)
    values: dict[str, Any] = {
        "agent": f"{folder}/agent.py:solve",
        "tasks": f"{calc}/train.jsonl",
        "grader": f"{folder}/grader.py:score",
        "model": f"{calc}/base",
        "policies": {"writer": f"{calc}/base", "re*": str(random_model)},
        "out": str(folder / "run"),
        "steps": 2,
        "tasks_per_step": 2,
        "group_size": 4,
        "learning_rate": 1e-3,
        "workers": 1,
        "kl_coefficient": 0.01,
    }
    return make_config(TrainConfig, values | changes)


def run(config: TrainConfig, listen=None, stop=None) -> RunFinished:
    return train(config, listen=listen or (lambda _: None), stop=stop)


def steps_of(out: Path) -> list[dict[str, float]]:
    """Metrics of every step, without those of the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "_per_s", "_s", "time/")
    return [{k: v for k, v in line.items() if not any(t in k for t in timed)} for line in lines]


def changed(folder: Path, base: Path) -> bool:
    """Whether a saved model's weights are others than those it began with."""
    now, before = (load_file(path / "model.safetensors") for path in (folder, base))
    assert now.keys() == before.keys()
    return any(not torch.equal(now[name], before[name]) for name in now)


async def calls_of(out: Path, step: int) -> list[Call]:
    store = open_store(out / "run.db")
    try:
        names = [f"{step:06d}-{t:04d}-{s:03d}" for t in range(2) for s in range(4)]
        return [call for result in await store.results(names) for call in result.calls]
    finally:
        await store.close()


def test_every_agent_samples_and_trains_its_own_policy(calc, tmp_path, random_model):
    config = settings(calc, tmp_path, random_model)
    done = run(config)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    folders = {name: checkpoint / "policies" / place for name, place in POLICIES.items()}
    assert done.checkpoint == str(checkpoint)
    assert done.policies == {name: str(folder) for name, folder in folders.items()}
    assert any(f"re*: {folders['re*']}" in line for line in closing_lines(done, config))
    assert changed(checkpoint, calc / "base")
    assert changed(folders["writer"], calc / "base")
    assert changed(folders["writer"], checkpoint), "two copies of one base go their own ways"
    assert changed(folders["re*"], random_model)
    for line in steps_of(tmp_path / "run"):
        assert line["agent/writer/trained"] == line["agent/rewriter/trained"] == 1
        for name in ("base", "writer", "re*"):
            assert line[f"learn/{name}/updates"] == 1
            assert line[f"learn/{name}/gap_max"] < 1e-4, "each was given what it sampled itself"
    for step in (1, 2):
        calls = asyncio.run(calls_of(tmp_path / "run", step))
        assert {(call.agent, call.policy, call.version) for call in calls} == {
            ("writer", "writer", step - 1),
            ("checker", "base", step - 1),
            ("rewriter", "re*", step - 1),
        }
    measured = evaluate(
        agent=config.agent,
        tasks=[{"question": "1+1?"}, {"question": "2+2?"}],
        grader=config.grader,
        model=str(checkpoint),
        policies=done.policies,
        out=str(tmp_path / "measured"),
        max_tokens=2,
    )
    assert (measured.rollouts, measured.excluded) == (2, 0)


def adapters_of(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The adapters of a checkpoint, by policy."""
    places = {"base": "."} | {name: f"policies/{place}" for name, place in POLICIES.items()}
    return {
        name: load_file(checkpoint / place / "adapter" / "adapter_model.safetensors")
        for name, place in places.items()
    }


def weight_changed(adapter: dict[str, torch.Tensor]) -> bool:
    """Whether it says something: its B matrices begin at zero."""
    return any(bool(w.any()) for name, w in adapter.items() if "lora_B" in name)


async def test_a_base_that_policies_share_is_loaded_once_and_is_their_reference_too(
    calc, tmp_path, random_model, monkeypatch
):
    loaded: list[str] = []

    def load(source: Path | str, **options: Any) -> LoadedModel:
        loaded.append(str(source))
        return load_model(source, **options)

    monkeypatch.setattr("fulmen.launch.loading.load_model", load)
    config = settings(calc, tmp_path, random_model, lora_rank=4)
    sources = policy_sources(config)
    serve = partial(serve_trained, config, HostPlan(config, sources))
    policies = serve_in_groups(sources, serve, partial(base_of, config))
    engines = {policy.source.name: policy.engine for policy in policies}
    learners = make_learners(config, policies, None, None, lambda name: engines[name].updating)
    for engine in engines.values():
        await engine.close()
    assert list(learners.versions) == ["base", "writer", "re*"]
    assert loaded == [f"{calc}/base", str(random_model)]


def test_policies_of_one_base_are_adapters_of_one_model(calc, tmp_path, random_model):
    company = {"workers": 4, "processes": 4}  # so that adapters meet in batches
    config = settings(calc, tmp_path, random_model, lora_rank=4, learning_rate=1e-2, **company)
    events: list[Event] = []
    done = run(config, events.append)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    adapters = adapters_of(checkpoint)
    (started,) = (event for event in events if isinstance(event, RunStarted))
    bases = [calc / "base", random_model]
    assert started.parameters == sum(
        sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
        for folder in bases
    ) + sum(w.numel() for adapter in adapters.values() for w in adapter.values())
    assert all(map(weight_changed, adapters.values()))
    assert any(
        not torch.equal(adapters["base"][name], adapters["writer"][name])
        for name in adapters["base"]
    ), "two adapters of one base go their own ways"
    for step, line in enumerate(steps_of(tmp_path / "run"), start=1):
        for name in ("base", "writer", "re*"):
            assert line[f"learn/{name}/updates"] == 1
            assert line[f"learn/{name}/gap_max"] < 1e-4, "each was given what it sampled itself"
            if step == 2:
                assert line[f"learn/{name}/kl_reference"] > 1e-6
        calls = asyncio.run(calls_of(tmp_path / "run", step))
        assert {(call.agent, call.policy, call.version) for call in calls} == {
            ("writer", "writer", step - 1),
            ("checker", "base", step - 1),
            ("rewriter", "re*", step - 1),
        }
    for name, place in (("base", "."), ("writer", "policies/writer")):
        merged = AutoModelForCausalLM.from_pretrained(checkpoint / place)
        again = AutoModelForCausalLM.from_pretrained(calc / "base")
        again.load_adapter(str(checkpoint / place / "adapter"))
        ids = torch.arange(30)[None]
        with torch.no_grad():
            ours, theirs = (model(input_ids=ids).logits for model in (merged, again))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)
    measured = evaluate(
        agent=config.agent,
        tasks=[{"question": "1+1?"}],
        grader=config.grader,
        model=str(checkpoint),
        policies=done.policies,
        out=str(tmp_path / "measured"),
        max_tokens=2,
    )
    assert (measured.rollouts, measured.excluded) == (1, 0)


def test_only_the_policy_whose_agent_earned_something_changes(calc, tmp_path, random_model):
    (tmp_path / "equal.py").write_text(EQUAL)
    (tmp_path / "chance.py").write_text(CHANCE)
    (tmp_path / "air.toml").write_text(RULE.format(file=tmp_path / "chance.py"))
    config = settings(
        calc,
        tmp_path,
        random_model,
        grader=f"{tmp_path}/equal.py:score",
        air=f"{tmp_path}/air.toml",
        credit="per-agent",
        kl_coefficient=0.0,
    )
    done = run(config)
    assert done.checkpoint is not None
    assert changed(Path(done.policies["writer"]), calc / "base")
    assert not changed(Path(done.policies["re*"]), random_model)
    assert not changed(Path(done.checkpoint), calc / "base")
    calls = asyncio.run(calls_of(tmp_path / "run", 2))
    assert {(call.policy, call.version) for call in calls} == {
        ("writer", 1),
        ("base", 0),
        ("re*", 0),
    }


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4, "learning_rate": 1e-2}])
def test_a_run_of_several_policies_goes_on_exactly_where_it_was(calc, tmp_path, random_model, lora):
    whole, parts = tmp_path / "whole", tmp_path / "run"
    run(settings(calc, tmp_path, random_model, steps=3, out=str(whole), **lora))
    stop = threading.Event()

    def stop_in_step_one(event: Event) -> None:
        if isinstance(event, Progress) and event.phase == "learn":
            stop.set()

    first = run(settings(calc, tmp_path, random_model, steps=3, **lora), stop_in_step_one, stop)
    assert (first.stopped, first.steps) == (True, 1)
    fewer = {"policies": {"writer": f"{calc}/base"}, "if_exists": "resume"}
    with pytest.raises(ConfigError, match=r"has a policy 're\*', which the settings do not name"):
        run(settings(calc, tmp_path, random_model, **fewer, **lora))
    again = settings(calc, tmp_path, random_model, steps=3, if_exists="resume", **lora)
    second = run(again)
    assert (second.stopped, second.steps) == (False, 3)
    assert steps_of(parts) == steps_of(whole)
    for place in (".", "policies/writer", "policies/re%2A"):
        ours, theirs = (folder / "checkpoints" / "step-000003" / place for folder in (parts, whole))
        assert not changed(ours, theirs)
