"""The reward curve of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fulmen.trainer.events import EvalDone

_WINDOW = 10
"""Steps in the running mean."""


def draw_rewards(path: Path, rewards: Sequence[float], evals: Sequence[EvalDone]) -> None:
    """Draw training reward by step, its running mean, and held-out measurements, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = np.arange(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="training reward, each step")
    smooth = [_mean(rewards[max(0, n - _WINDOW) : n]) for n in range(1, len(rewards) + 1)]
    axes.plot(steps, smooth, color="#2171b5", linewidth=2, label=f"mean of {_WINDOW} steps")
    # Sampled decoding is measured at the ends only; a line between them would invent a course.
    for mode, colour, style in (("greedy", "#d94801", "o-"), ("sampled", "#6a51a3", "s")):
        found = [e for e in evals if e.mode == mode]
        if found:
            errors = [[e.reward - e.low for e in found], [e.high - e.reward for e in found]]
            axes.errorbar(
                [e.step for e in found],
                [e.reward for e in found],
                yerr=errors,
                fmt=style,
                capsize=3,
                color=colour,
                label=f"held out, {mode} (95 % interval)",
            )
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _mean(values: Sequence[float]) -> float:
    """Of those that are numbers: a step in which no rollout had a reward leaves a gap."""
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else float("nan")
