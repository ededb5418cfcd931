"""`make demo`: train the Calc agent and say what came of it.

python demo.py [--seed N] [--steps N] [--agent agent.py:solve] [--out FOLDER]
"""

import argparse
import json
import sys
from pathlib import Path

from recipe import recipe

from fulmen.cli.main import main as fulmen


def settings(options: argparse.Namespace) -> dict[str, object]:
    """The recipe, with what the command line changes."""
    changes = {
        "agent": options.agent,
        "steps": options.steps,
        "out": options.out or f"runs/calc-seed{options.seed}",
        "if-exists": "new",
        "seed": options.seed,
    }
    return recipe() | {key: value for key, value in changes.items() if value is not None}


def results(run: Path) -> list[dict[str, object]]:
    """The figures of a run, in the form of every benchmark of the project."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    greedy = [line["success"] for line in lines if line.get("eval") == "greedy"]
    sampled = [line["success"] for line in lines if line.get("eval") == "sampled"]
    return [
        {"name": "demo.calc.before", "value": greedy[0], "unit": "success"},
        {"name": "demo.calc.after", "value": greedy[-1], "unit": "success"},
        {"name": "demo.calc.before_sampled", "value": sampled[0], "unit": "success"},
        {"name": "demo.calc.after_sampled", "value": sampled[-1], "unit": "success"},
        {"name": "demo.calc.train_seconds", "value": summary["train_seconds"], "unit": "s"},
        {"name": "demo.calc.peak_mb", "value": summary["peak_mb"], "unit": "MiB"},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the Calc agent.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--agent", help="another agent, e.g. 'python plain_agent.py'")
    parser.add_argument("--out", help="folder of the run")
    options = parser.parse_args()
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
