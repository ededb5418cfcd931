"""`make experiment-calc|sql|rag`: the paper's experiments in mini form, over seeds.

python experiment.py calc [--seeds 3] [--first-seed 0] [--steps N] [--variant identical|air|…]

Each run is a process of its own. RESULT lines give the figures of every seed; the picture beside
the runs shows their curves.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trial import GOALS, command, free, load, read_metrics, steps_to, train_success, variants


@dataclass(frozen=True, slots=True)
class Curve:
    """One run, read back from its folder."""

    seed: int
    greedy: list[tuple[int, float]]
    sampled: list[tuple[int, float]]
    train: list[float]
    """Success of every training step."""
    seconds: float
    peak_mb: float


def read(run: Path, seed: int) -> Curve:
    """What a run wrote down."""
    metrics = read_metrics(run)
    summary = json.loads((run / "summary.json").read_text())

    def evals(mode: str) -> list[tuple[int, float]]:
        return [(line["step"], line["success"]) for line in metrics if line.get("eval") == mode]

    return Curve(
        seed,
        evals("greedy"),
        evals("sampled"),
        train_success(metrics),
        summary["train_seconds"],
        summary["peak_mb"],
    )


def report(name: str, variant: str, curve: Curve) -> None:
    """One RESULT line for every figure."""
    figures = {
        "before": (curve.greedy[0][1], "success"),
        "after": (curve.greedy[-1][1], "success"),
        "before_sampled": (curve.sampled[0][1], "success"),
        "after_sampled": (curve.sampled[-1][1], "success"),
        "steps_to_goal": (steps_to(curve.train, GOALS[name]), "steps"),
        "train_seconds": (round(curve.seconds, 1), "s"),
        "peak_mb": (round(curve.peak_mb), "MiB"),
    }
    for what, (value, unit) in figures.items():
        line = {"name": f"experiment.{name}.{what}", "value": value, "unit": unit}
        print("RESULT " + json.dumps({**line, "seed": curve.seed, "variant": variant}), flush=True)


def draw(path: Path, title: str, goal: float, curves: Sequence[Curve]) -> None:
    """Held-out success by step, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for curve in curves:
        steps, values = zip(*curve.greedy, strict=True)
        axes.plot(steps, values, "o-", markersize=4, label=f"seed {curve.seed}")
    axes.axhline(goal, color="grey", linestyle="--", linewidth=1, label=f"goal {goal}")
    axes.set(xlabel="step", ylabel="held-out success, greedy", title=title, ylim=(0, 1))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train an example's agent with several seeds.")
    parser.add_argument("name", choices=sorted(GOALS))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--variant", choices=sorted(variants("calc")), default="identical")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    options = parser.parse_args()
    name, variant = options.name, options.variant
    example = load(name)
    example.prepare()
    curves: list[Curve] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        settings = {**example.recipe(), **variants(name)[variant], "seed": seed}
        settings["steps"] = options.steps or settings["steps"]
        out = free(options.runs / f"{name}-{variant}-seed{seed}")
        subprocess.run(command(settings, out), check=True)  # noqa: S603 - settings of our own
        curves.append(read(out, seed))
        report(name, variant, curves[-1])
    picture = options.runs / f"{name}-{variant}.png"
    draw(picture, f"{name}, {variant}", GOALS[name], curves)
    print(f"curves: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
