"""The recipe of SQL-mini; measured figures are in README.md and docs/experiments.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tasks import write_tasks

from shared import SETTINGS

HERE = Path(__file__).resolve().parent
TASKS = Path("runs/sql-tasks")


def prepare() -> None:
    """Write the tasks and their databases; always the same ones."""
    TASKS.mkdir(parents=True, exist_ok=True)
    databases = TASKS / "databases"
    write_tasks(TASKS / "train.jsonl", count=3000, seed=1, split="train", folder=databases)
    write_tasks(TASKS / "val.jsonl", count=256, seed=7, split="val", folder=databases)


def recipe() -> dict[str, object]:
    """Settings of `fulmen train`: 16 × 8 rollouts a step."""
    return {
        **SETTINGS,
        "agent": f"{HERE}/agent.py:solve",
        # As in the paper: the checker stays as it is.
        "train": "writer,rewriter",
        "tasks": TASKS / "train.jsonl",
        "val": TASKS / "val.jsonl",
        "grader": f"{HERE}/grader.py:score",
        "model": HERE / "base",
        "steps": 200,
        "max-tokens": 32,
        "eval-every": 40,
    }
