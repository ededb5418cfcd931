"""The recipe of Calc-mini; measured figures are in README.md and docs/experiments.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared import SETTINGS

HERE = Path(__file__).resolve().parent


def prepare() -> None:
    """Tasks and base model are there."""


def recipe() -> dict[str, object]:
    """Settings of `fulmen train`: 160 steps of 16 × 8 rollouts."""
    return {
        **SETTINGS,
        "agent": f"{HERE}/agent.py:solve",
        "tasks": HERE / "train.jsonl",
        "val": HERE / "val.jsonl",
        "grader": f"{HERE}/grader.py:score",
        "model": HERE / "base",
        "steps": 160,
        "max-tokens": 48,
        "eval-every": 40,
    }
