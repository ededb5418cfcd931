"""Agents of other protocols, trained: what the gateway records is what the learner can use."""

import json
from pathlib import Path
from typing import Any

import pytest

from fulmen.launch.train import train
from fulmen.schema.config import make_config
from fulmen.schema.training import TrainConfig

pytestmark = pytest.mark.e2e

HEAD = """
import json, os, httpx

def ask(path, **body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + path
    answer = httpx.post(url, json={"model": "any", **body}, headers=headers, timeout=100)
    answer.raise_for_status()
    return answer.json()
"""
AGENTS = {
    "chat in JSON": """
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
          "required": ["n"], "additionalProperties": False}

def solve(task):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    messages = [{"role": "user", "content": task["question"]}]
    answer = ask("/chat/completions", messages=messages, response_format=form)
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "length":  # it may think before it answers, and never end
        return 0
    return json.loads(choice["message"]["content"])["n"] % 2
""",
    "responses by reference": """
def solve(task):
    first = ask("/responses", input=task["question"], max_output_tokens=6)
    more = ask("/responses", input="and?", previous_response_id=first["id"], max_output_tokens=6)
    return more["usage"]["input_tokens"] % 2
""",
    "messages": """
def solve(task):
    messages = [{"role": "user", "content": task["question"]}]
    answer = ask("/messages", messages=messages, max_tokens=6)
    return answer["usage"]["output_tokens"] % 2
""",
    "completions": """
def solve(task):
    return len(ask("/completions", prompt=task["question"], max_tokens=5)["choices"][0]["text"]) % 2
""",
}
GRADER = "def score(output, rollout):\n    return int(rollout.rollout.id[-1]) % 2\n"


@pytest.mark.parametrize("kind", AGENTS)
def test_an_agent_of_any_protocol_is_trained_on_the_tokens_it_was_given(calc, tmp_path, kind):
    (tmp_path / "agent.py").write_text(HEAD + AGENTS[kind])
    (tmp_path / "grader.py").write_text(GRADER)
    out = tmp_path / "run"
    values: dict[str, Any] = {
        "agent": f"{tmp_path}/agent.py:solve",
        "tasks": f"{calc}/train.jsonl",
        "grader": f"{tmp_path}/grader.py:score",
        "model": f"{calc}/base",
        "out": str(out),
        "steps": 1,
        "tasks_per_step": 2,
        "group_size": 4,
        "workers": 4,
    }
    train(make_config(TrainConfig, values), listen=lambda _: None)
    (line,) = steps(out)
    assert line["collect/agent_errors"] == 0
    assert line["learn/updates"] == 1
    assert line["learn/gap_max"] < 1e-4


def steps(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval" not in line]
