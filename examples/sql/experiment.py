"""The SQL experiment: train the writer, checker and rewriter, and say what came of it.

python experiment.py [--seed N] [--steps N] [--out FOLDER]
"""

import argparse
import json
import sys
from pathlib import Path

from tasks import write_tasks

from fulmen.cli.main import main as fulmen

HERE = Path(__file__).resolve().parent
TASKS = Path("runs/sql-tasks")


def make_tasks(folder: Path) -> None:
    """Write the tasks and their databases; always the same ones."""
    folder.mkdir(parents=True, exist_ok=True)
    databases = folder / "databases"
    write_tasks(folder / "train.jsonl", count=3000, seed=1, split="train", folder=databases)
    write_tasks(folder / "val.jsonl", count=256, seed=7, split="val", folder=databases)


def settings(options: argparse.Namespace) -> dict[str, object]:
    """The recipe; what has been measured of it is in README.md."""
    return {
        "agent": f"{HERE}/agent.py:solve",
        "tasks": TASKS / "train.jsonl",
        "val": TASKS / "val.jsonl",
        "grader": f"{HERE}/grader.py:score",
        "model": HERE / "base",
        # The paper trains writer and rewriter only: a setting that says so goes here.
        "out": options.out or f"runs/sql-seed{options.seed}",
        "if-exists": "new",
        "seed": options.seed,
        "steps": options.steps,
        "workers": 64,
        "tasks-per-step": 16,
        "group-size": 8,
        "learning-rate": 1e-3,
        "schedule": "linear",
        "entropy-coefficient": 0.005,
        "max-tokens": 32,
        "eval-every": 50,
    }


def results(run: Path) -> list[dict[str, object]]:
    """The figures of a run, in the form of every benchmark of the project."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    greedy = [line["success"] for line in lines if line.get("eval") == "greedy"]
    sampled = [line["success"] for line in lines if line.get("eval") == "sampled"]
    return [
        {"name": "experiment.sql.before", "value": greedy[0], "unit": "success"},
        {"name": "experiment.sql.after", "value": greedy[-1], "unit": "success"},
        {"name": "experiment.sql.before_sampled", "value": sampled[0], "unit": "success"},
        {"name": "experiment.sql.after_sampled", "value": sampled[-1], "unit": "success"},
        {"name": "experiment.sql.train_seconds", "value": summary["train_seconds"], "unit": "s"},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the SQL agent.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--out", help="folder of the run")
    options = parser.parse_args()
    make_tasks(TASKS)
    flags = [part for key, value in settings(options).items() for part in (f"--{key}", str(value))]
    sys.argv = ["fulmen", "train", *flags]
    started = set(Path("runs").glob("*"))
    fulmen()
    made = Path(str(settings(options)["out"]))
    new = [path for path in made.parent.glob(f"{made.name}*") if path not in started]
    for line in results(max(new, key=lambda path: path.stat().st_mtime)):
        print("RESULT " + json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
