"""Whole runs with an adapter, and in two processes that torchrun starts (CPUs over gloo)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fulmen.engine.model import load_model
from fulmen.launch.export import export
from fulmen.launch.train import train
from fulmen.schema.config import make_config
from fulmen.schema.errors import ConfigError, ModelError
from fulmen.schema.training import TrainConfig

pytestmark = pytest.mark.e2e

TWO_AGENTS = """
import json, os, urllib.request

def ask(agent, question):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-fulmen-agent": agent}
    headers["content-type"] = "application/json"
    body = {"model": "any", "messages": [{"role": "user", "content": question}], "max_tokens": 6}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def solve(task):
    return "".join(ask(agent, task["question"]) for agent in ("writer", "checker"))
"""
BY_CHANCE = "def score(rollout):\n    return int(rollout.rollout.id[-1]) % 2\n"
TIMED = ("seconds", "_per_s", "_s", "time/")


def values(calc: Path, out: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "agent": f"{calc}/plain_agent.py:solve",
        "tasks": f"{calc}/train.jsonl",
        "grader": f"{calc}/grader.py:score",
        "model": f"{calc}/base",
        "out": str(out),
        "steps": 3,
        "tasks_per_step": 3,
        "group_size": 4,
        "learning_rate": 2e-3,
        "warmup_steps": 0,
        "max_tokens": 48,
        "workers": 1,
        "seed": 5,
        "checkpoint_every": 1,
        "kl_coefficient": 0.01,
    }
    return settings | changes


def run(calc: Path, out: Path, **changes: Any) -> None:
    train(make_config(TrainConfig, values(calc, out, **changes)), listen=lambda _: None)


def curve(out: Path) -> list[dict[str, float]]:
    """Metrics of every step, without those of the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMED)}
        for line in lines
        if "eval" not in line
    ]


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def largest_change(one: PreTrainedModel, other: PreTrainedModel) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_an_adapter_is_trained_sampled_with_kept_and_merged(calc, tmp_path):
    lora = {"lora_rank": 4, "learning_rate": 1e-2}
    run(calc, tmp_path / "whole", **lora)
    run(calc, tmp_path / "halves", steps=2, **lora)
    last = curve(tmp_path / "whole")[-1]
    assert last["learn/kl_reference"] > 1e-6, "it has moved away from the model without it"
    assert last["learn/gap_max"] < 1e-3, "the engine samples from what the learner has trained"
    two = tmp_path / "whole" / "checkpoints" / "step-000002"
    three = tmp_path / "whole" / "checkpoints" / "step-000003"
    assert not (two / "model.safetensors").exists()
    with pytest.raises(ModelError, match="fulmen export"):
        load_model(two)
    merged = load(three)
    assert 1e-3 < largest_change(merged, load(calc / "base")) < 1
    export(three, tmp_path / "exported")
    assert largest_change(merged, load(tmp_path / "exported")) < 1e-6
    load_model(tmp_path / "exported")
    with pytest.raises(ConfigError, match="exists already"):
        export(three, tmp_path / "exported")
    run(calc, tmp_path / "halves", if_exists="resume", **lora)
    assert curve(tmp_path / "halves") == curve(tmp_path / "whole")
    assert (three / "adapter" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "halves" / "checkpoints" / "step-000003" / "adapter/adapter_model.safetensors"
    ).read_bytes()


def test_two_processes_train_as_one_and_one_goes_on_from_there(calc, tmp_path):
    few = {"micro_batch_tokens": 400, "steps": 2}
    run(calc, tmp_path / "one", **few)
    flags = values(calc, tmp_path / "two", **few)
    done = in_two_processes("train", "--activation-checkpointing", flags=flags)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    # The second step samples from weights that differ by rounding, so tokens may differ there.
    assert two[0] == pytest.approx(one[0], rel=1e-3, abs=1e-5)
    assert two[1]["learn/gap_max"] < 1e-3, "the engine has the weights that were put together"
    saved = tmp_path / "two" / "checkpoints"
    ours, theirs = (load(tmp_path / n / "checkpoints" / "step-000001") for n in ("one", "two"))
    assert largest_change(ours, theirs) < 1e-4 < largest_change(ours, load(calc / "base"))
    assert len(list((saved / "step-000002" / "state").iterdir())) == 2
    export(saved / "step-000002", tmp_path / "exported")
    assert largest_change(load(tmp_path / "exported"), load(saved / "step-000002")) == 0
    run(calc, tmp_path / "two", if_exists="resume", micro_batch_tokens=400)
    assert curve(tmp_path / "two")[2]["learn/gap_max"] < 1e-3


def test_two_processes_train_every_policy(calc, tmp_path):
    (tmp_path / "agent.py").write_text(TWO_AGENTS)
    (tmp_path / "grader.py").write_text(BY_CHANCE)
    own = {"agent": f"{tmp_path}/agent.py:solve", "grader": f"{tmp_path}/grader.py:score"}
    flags = values(calc, tmp_path / "run", **own, steps=2)
    base = calc / "base"
    done = in_two_processes("train", "--policy", f"writer={base}", flags=flags)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in curve(tmp_path / "run"):
        assert line["learn/base/updates"] == line["learn/writer/updates"] == 1
        assert max(line["learn/base/gap_max"], line["learn/writer/gap_max"]) < 1e-3
    last = tmp_path / "run" / "checkpoints" / "step-000002"
    checker, writer, start = (load(each) for each in (last, last / "policies" / "writer", base))
    assert largest_change(checker, start) > 1e-4
    assert largest_change(writer, start) > 1e-4
    assert largest_change(writer, checker) > 1e-4, "each was given its own calls"
    for folder in (last, last / "policies" / "writer"):
        assert len(list((folder / "state").iterdir())) == 2, "each process has kept its part"


def test_what_one_process_cannot_use_ends_both_with_one_line(calc, tmp_path):
    done = in_two_processes("train", flags=values(calc, tmp_path / "x", grader="none.py:score"))
    assert done.returncode != 0
    assert done.stderr.count("error: grader 'none.py:score'") == 1, done.stderr


def in_two_processes(*command: str, flags: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    words = [w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *torchrun, "-m", "fulmen.cli.main", *command, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_bfloat16_training_keeps_its_float32_weights_for_export(calc, tmp_path):
    run(calc, tmp_path / "run", dtype="bfloat16", steps=1, kl_coefficient=0.0)
    saved = tmp_path / "run" / "checkpoints" / "step-000001"
    export(saved, tmp_path / "exported")
    exact, coarse = load(tmp_path / "exported"), load(saved)
    assert exact.dtype == torch.float32
    for ours, theirs in zip(exact.parameters(), coarse.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), theirs.bfloat16())
    assert any((p != p.bfloat16().float()).any() for p in exact.parameters())
