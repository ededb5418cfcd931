"""`make ablation`: steps until a fixed success, by way of crediting, example and seed.

python ablation.py [calc sql rag] [--seeds 3] [--variants identical air …] [--runs runs/ablation]

Each run has the settings of its experiment, without the held-out measurements, and is ended as soon
as the mean success of ten training steps reaches the goal. What was run to its end is not run
again; an interrupted run is started anew. Table and picture are kept up to date after every run.
"""

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trial import (
    GOALS,
    WINDOW,
    command,
    folders,
    free,
    load,
    moving_mean,
    read_metrics,
    steps_to,
    train_success,
    variants,
)

LOOK_S = 2.0
"""Seconds between two looks at a run that is going on; a step takes longer."""
INTERRUPTED = 130
"""Exit status of a run that was told to stop."""
COLOURS = ("#2171b5", "#d94801", "#238b45", "#6a51a3", "#c51b8a")
UNASKED = 4
"""Variants that are run when none are named."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run that came to its end."""

    name: str
    variant: str
    seed: int
    train: list[float]
    """Success of every step until the end."""
    steps: int
    """How many it could have taken."""

    @property
    def reached(self) -> int | None:
        """The step at which the goal was reached."""
        return steps_to(self.train, GOALS[self.name])


def over(train: Sequence[float], goal: float, steps: int) -> bool:
    """Whether nothing more can be learned from a run: the goal is reached, or no step is left.

    >>> over([0.4] * 10, 0.5, 200), over([0.6] * 10, 0.5, 200), over([0.4] * 200, 0.5, 200)
    (False, True, True)
    """
    return steps_to(train, goal) is not None or len(train) >= steps


def finished(out: Path, goal: float, steps: int) -> list[float] | None:
    """Training success by step of an earlier run that came to its end; None if there is none."""
    for folder in folders(out):
        train = train_success(read_metrics(folder))
        if over(train, goal, steps):
            return train
    return None


def run_until(goal: float, settings: Mapping[str, object], out: Path) -> list[float]:
    """Train until the goal is reached or the last step is done; training success by step.

    Raises:
        CalledProcessError: the run failed.
        KeyboardInterrupt: someone else ended it.
    """
    arguments = command(settings, out)
    process = subprocess.Popen(arguments)  # noqa: S603 - settings of our own
    told = False
    try:
        while process.poll() is None:
            if not told and steps_to(train_success(read_metrics(out)), goal) is not None:
                process.send_signal(signal.SIGINT)
                told = True
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
    except KeyboardInterrupt:  # which the terminal has sent to the run as well
        process.wait()
        raise
    if process.returncode not in (0, INTERRUPTED):
        raise subprocess.CalledProcessError(process.returncode, arguments)
    if process.returncode == INTERRUPTED and not told:
        raise KeyboardInterrupt
    return train_success(read_metrics(out))


def measure(name: str, variant: str, seed: int, recipe: Mapping[str, object], runs: Path) -> Result:
    """Train one agent once, unless that was done before."""
    settings = {key: value for key, value in recipe.items() if key != "val"}
    settings |= variants(name)[variant] | {"seed": seed}
    steps = int(str(settings["steps"]))
    out = runs / f"{name}-{variant}-seed{seed}"
    train = finished(out, GOALS[name], steps)
    if train is None:
        train = run_until(GOALS[name], settings, free(out))
    return Result(name, variant, seed, train, steps)


def report(result: Result) -> None:
    """The RESULT line of a run."""
    name = f"ablation.{result.name}.{result.variant}.steps_to_goal"
    line = {"name": name, "value": result.reached, "unit": "steps", "seed": result.seed}
    print("RESULT " + json.dumps(line), flush=True)


def table(results: Sequence[Result]) -> str:
    """Variants by experiments, in Markdown: the median of the seeds, and each of them."""
    names = list(dict.fromkeys(result.name for result in results))
    rows = [
        ["variant", *(f"{name} (goal {GOALS[name]})" for name in names)],
        ["---"] * (len(names) + 1),
    ]
    for variant in dict.fromkeys(result.variant for result in results):
        row = [r for r in results if r.variant == variant]
        rows.append([variant, *(_cell([r for r in row if r.name == name]) for name in names)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(results: Sequence[Result]) -> str:
    """A run that never reached the goal counts as later than all others in the median."""
    if not results:
        return ""
    reached = [math.inf if r.reached is None else r.reached for r in results]
    never = f"never ({results[0].steps})"
    values = [never if math.isinf(value) else f"{value:g}" for value in reached]
    median = statistics.median(reached)
    return f"{never if math.isinf(median) else f'**{median:g}**'}: {', '.join(values)}"


def draw(path: Path, results: Sequence[Result]) -> None:
    """Training success by step, a panel for each experiment and a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(result.name for result in results))
    colours = dict(zip(variants("calc"), COLOURS, strict=True))
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(5 * len(names), 4), layout="constrained", sharey=True, squeeze=False
    )
    for name, axes in zip(names, panels[0], strict=True):
        labels = dict(zip(colours, colours, strict=True))
        for result in (r for r in results if r.name == name):
            mean = moving_mean(result.train)
            axes.plot(
                range(WINDOW, WINDOW + len(mean)),
                mean,
                color=colours[result.variant],
                linewidth=1,
                # Once for all seeds.
                label=labels.pop(result.variant, None),
            )
        axes.axhline(GOALS[name], color="grey", linestyle="--", linewidth=1)
        axes.set(xlabel="step", title=f"{name}, goal {GOALS[name]}", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", frameon=False)
    panels[0][0].set_ylabel(f"training success, mean of {WINDOW} steps")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="How many steps to a fixed success, by credit.")
    parser.add_argument("names", nargs="*", default=list(GOALS), help="calc, sql, rag; all")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--variants", nargs="+", choices=list(variants("calc")))
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"), help="their folder")
    options = parser.parse_args()
    if unknown := set(options.names) - set(GOALS):
        parser.error(f"there is no experiment {sorted(unknown)[0]!r}; there are {', '.join(GOALS)}")
    options.runs.mkdir(parents=True, exist_ok=True)
    recipes: dict[str, dict[str, object]] = {}
    for name in options.names:
        example = load(name)
        example.prepare()
        recipes[name] = example.recipe()
    results: list[Result] = []
    # Seeds outermost: what there is at any time compares all variants alike.
    for seed in range(options.seeds):
        for name in options.names:
            for variant in options.variants or list(variants(name))[:UNASKED]:
                results.append(measure(name, variant, seed, recipes[name], options.runs))
                report(results[-1])
                (options.runs / "ablation.md").write_text(table(results))
                draw(options.runs / "ablation.png", results)
    print(f"\n{table(results)}\ncurves: {options.runs / 'ablation.png'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
