"""The recipe of Calc-mini; measured figures are in README.md and docs/experiments.md."""

from pathlib import Path

HERE = Path(__file__).resolve().parent


def prepare() -> None:
    """Tasks and base model are there."""


def recipe() -> dict[str, object]:
    """Settings of `fulmen train`: 160 steps of 16 × 8 rollouts."""
    return {
        "agent": f"{HERE}/agent.py:solve",
        "tasks": HERE / "train.jsonl",
        "val": HERE / "val.jsonl",
        "grader": f"{HERE}/grader.py:score",
        "model": HERE / "base",
        "steps": 160,
        "workers": 64,
        "tasks-per-step": 16,
        "group-size": 8,
        "learning-rate": 1e-3,
        "schedule": "linear",
        "entropy-coefficient": 0.005,
        "max-tokens": 48,
        "eval-every": 40,
    }
