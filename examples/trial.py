"""What the scripts of the experiments share: settings of a run, its process, what it wrote down."""

import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
GOALS = {"calc": 0.77, "sql": 0.56, "rag": 0.35}
"""Success that each is to reach, held out."""
WINDOW = 10
"""Steps over which training success is averaged."""


def load(name: str) -> ModuleType:
    """The recipe of an example: `recipe()` and `prepare()`."""
    folder = HERE / name
    sys.path.insert(0, str(folder))
    location = importlib.util.spec_from_file_location(f"{name}_recipe", folder / "recipe.py")
    assert location is not None
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


def variants(name: str) -> dict[str, dict[str, object]]:
    """Settings that the ablation changes, by the name of the variant; the first four unasked."""
    return {
        "identical": {},
        "air": {"air": HERE / name / "air.toml"},
        "discounted": {"credit": "discounted"},
        "turn-group": {"credit": "turn-group"},
        "turn-group-undiscounted": {"credit": "turn-group", "discount": 1.0},
    }


def command(settings: Mapping[str, object], out: Path) -> list[str]:
    """`fulmen train` with these settings, on this Python."""
    given = {**settings, "out": out}
    flags = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    return [sys.executable, "-m", "fulmen.cli.main", "train", *flags]


def folders(out: Path) -> list[Path]:
    """The folders of a run that was started once or more: `out`, `out-2`, …, as they were made."""
    found: list[Path] = []
    while (path := _numbered(out, len(found) + 1)).exists():
        found.append(path)
    return found


def free(out: Path) -> Path:
    """The folder that a run started now takes: the first of `out`, `out-2`, … that is not there."""
    return _numbered(out, len(folders(out)) + 1)


def _numbered(out: Path, number: int) -> Path:
    return out if number == 1 else out.with_name(f"{out.name}-{number}")


def read_metrics(run: Path) -> list[dict]:
    """What a run has written down so far, oldest first; it may be going on."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    # The last line may be half written.
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train_success(metrics: Sequence[Mapping]) -> list[float]:
    """Success of every training step; 0 where no rollout had a reward."""
    return [line.get("reward/success", 0.0) for line in metrics if "eval" not in line]


def moving_mean(train: Sequence[float]) -> list[float]:
    """Mean of the last ten steps, from the tenth step on.

    >>> moving_mean([0.0] * 10 + [1.0, 1.0])
    [0.0, 0.1, 0.2]
    """
    return [statistics.fmean(train[step - WINDOW : step]) for step in range(WINDOW, len(train) + 1)]


def steps_to(train: Sequence[float], goal: float) -> int | None:
    """The first step at which the mean of the last ten reaches the goal; None if none does.

    >>> steps_to([0.0] * 10 + [1.0] * 10, 0.5)
    15
    """
    for step, mean in enumerate(moving_mean(train), start=WINDOW):
        if mean >= goal:
            return step
    return None
