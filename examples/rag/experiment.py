"""Train the RAG agent and say what came of it.

    python experiment.py [--seed N] [--steps N] [--out FOLDER]

Success is the share of answers with a reward of at least one half. An answer of RAG-mini is one
name, so this is the mean F1; the reward's 0.1 for the format alone does not count.
"""

import argparse
import json
import sys
from pathlib import Path

from fulmen.cli.main import main as fulmen

HERE = Path(__file__).resolve().parent


def settings(options: argparse.Namespace) -> dict[str, object]:
    """The recipe; measured figures are in README.md."""
    return {
        "agent": f"{HERE}/agent.py:solve",
        "tasks": HERE / "train.jsonl",
        "val": HERE / "val.jsonl",
        "grader": f"{HERE}/grader.py:score",
        "model": HERE / "base",
        "out": options.out or f"runs/rag-seed{options.seed}",
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
        "eval-every": 40,
    }


def results(run: Path) -> list[dict[str, object]]:
    """The figures of a run, in the form of every benchmark of the project."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    greedy = [line for line in lines if line.get("eval") == "greedy"]
    sampled = [line for line in lines if line.get("eval") == "sampled"]
    return [
        _result("before", greedy[0]["success"], "success"),
        _result("after", greedy[-1]["success"], "success"),
        _result("before_sampled", sampled[0]["success"], "success"),
        _result("after_sampled", sampled[-1]["success"], "success"),
        _result("before_reward", greedy[0]["reward"], "reward"),
        _result("after_reward", greedy[-1]["reward"], "reward"),
        _result("train_seconds", summary["train_seconds"], "s"),
        _result("peak_mb", summary["peak_mb"], "MiB"),
    ]


def _result(name: str, value: float, unit: str) -> dict[str, object]:
    return {"name": f"experiment.rag.{name}", "value": value, "unit": unit}


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the RAG agent.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", help="folder of the run")
    options = parser.parse_args()
    flags = [part for key, value in settings(options).items() for part in (f"--{key}", str(value))]
    sys.argv = ["fulmen", "train", *flags]
    made = Path(str(settings(options)["out"]))
    started = set(made.parent.glob(f"{made.name}*"))
    fulmen()
    new = [p for p in made.parent.glob(f"{made.name}*") if p.is_dir() and p not in started]
    for line in results(max(new, key=lambda path: path.stat().st_mtime)):
        print("RESULT " + json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
