"""The recipe of RAG-mini; measured figures are in README.md and docs/experiments.md.

Success is the share of answers with a reward of at least one half. An answer of RAG-mini is one
name, so this is the mean F1; the reward's 0.1 for the format alone does not count.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared import SETTINGS

HERE = Path(__file__).resolve().parent


def prepare() -> None:
    """Tasks, corpus and base model are there."""


def recipe() -> dict[str, object]:
    """Settings of `fulmen train`: 80 steps of 16 × 8 rollouts."""
    return {
        **SETTINGS,
        "agent": f"{HERE}/agent.py:solve",
        "tasks": HERE / "train.jsonl",
        "val": HERE / "val.jsonl",
        "grader": f"{HERE}/grader.py:score",
        "model": HERE / "base",
        "steps": 80,
        "max-tokens": 32,
        "eval-every": 20,
    }
