"""Agents that are not trained: one has a frozen model of its own, in the same process."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulmen.launch.train import train
from fulmen.schema.config import make_config
from fulmen.schema.errors import ConfigError
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store
from models import tiny_model

pytestmark = pytest.mark.e2e

AGENT = """
import os, httpx

def ask(agent, question, temperature):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "x-fulmen-agent": agent}
    body = {"model": "any", "messages": [{"role": "user", "content": question}],
            "max_tokens": 6, "temperature": temperature}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=100)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]

def solve(task):
    draft = ask("writer", task["question"], 1.0)
    return ask("checker", task["question"], 0.0) + draft
"""
GRADER = "def score(rollout):\n    return int(rollout.rollout.id[-1]) % 2\n"


def random_model(folder: Path, base: Path) -> Path:
    """A model folder whose weights know nothing."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def test_an_agent_with_a_frozen_model_of_its_own_is_recorded_and_not_trained(calc, tmp_path):
    frozen = random_model(tmp_path / "frozen", calc / "base")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "grader.py").write_text(GRADER)
    (tmp_path / "others.toml").write_text(f'[rules]\nfolder = "{frozen}"\nagents = ["check*"]\n')
    values = {
        "agent": f"{tmp_path}/agent.py:solve",
        "tasks": f"{calc}/train.jsonl",
        "grader": f"{tmp_path}/grader.py:score",
        "model": f"{calc}/base",
        "out": str(tmp_path / "run"),
        "other_models": str(tmp_path / "others.toml"),
        "steps": 2,
        "tasks_per_step": 2,
        "group_size": 4,
        "learning_rate": 1e-3,
    }
    train(make_config(TrainConfig, values), listen=lambda _: None)
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["dropped/other_model"] == 8
        assert line["learn/updates"] == 1
        assert line["learn/gap_max"] < 1e-4, "the learner was given the writer's calls only"
    model = AutoModelForCausalLM.from_pretrained(frozen, dtype=torch.float32).eval()
    for call in asyncio.run(calls_of(tmp_path / "run", step=2)):
        if call.agent == "writer":
            assert (call.policy, call.version, call.temperature) == ("base", 1, 1.0)
            continue
        assert (call.policy, call.version, call.temperature) == ("rules", 0, 0.0)
        ids = list(call.prompt_ids)
        for token in call.completion_ids:
            assert model(input_ids=torch.tensor([ids])).logits[0, -1].argmax() == token
            ids.append(token)


async def calls_of(run: Path, step: int):
    store = open_store(run / "run.db")
    try:
        names = [f"{step:06d}-{t:04d}-{s:03d}" for t in range(2) for s in range(4)]
        return [call for result in await store.results(names) for call in result.calls]
    finally:
        await store.close()


def test_a_frozen_model_may_not_have_the_name_of_the_one_that_is_trained(calc, tmp_path):
    (tmp_path / "others.toml").write_text(f'[base]\nfolder = "{calc}/base"\n')
    values = {
        "agent": f"{calc}/plain_agent.py:solve",
        "tasks": f"{calc}/train.jsonl",
        "model": f"{calc}/base",
        "out": str(tmp_path / "run"),
        "other_models": str(tmp_path / "others.toml"),
    }
    with pytest.raises(ConfigError, match=r"others.toml: \[base\] has the name of a model that"):
        train(make_config(TrainConfig, values), listen=lambda _: None)
