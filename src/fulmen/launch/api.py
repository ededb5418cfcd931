"""Fulmen from Python: the settings as keyword arguments, functions and lists where files may be."""

import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fulmen.credit.rules import Rule
from fulmen.launch.evaluate import evaluate as run_evaluation
from fulmen.launch.train import train as run_training
from fulmen.schema.config import EvalConfig, make_config
from fulmen.schema.errors import AgentError
from fulmen.schema.training import TrainConfig
from fulmen.trainer.events import EvalDone, Event, Listener, RunFinished
from fulmen.trainer.sources.rows import iterable_rows

_FUNCTIONS = ("agent", "grader", "train", "advantage")
_TASKS = ("tasks", "val")


def train(*, listen: Listener | None = None, **settings: Any) -> RunFinished:  # noqa: ANN401 - see TrainConfig
    """Train the model behind an agent; settings are those of `TrainConfig`.

    `agent`, `grader`, `train` and `advantage` may be functions, `tasks` and `val` any iterables of
    JSON values or functions that return some, `train` a list of names, `air` a list of
    `fulmen.Rule`.
    `listen` is called with every event of the run.

    Raises:
        FulmenError: something given cannot be used; one line says what, where, and what to do.
    """
    return run_training(make_config(TrainConfig, _plain(settings)), listen=listen or _ignore)


def evaluate(*, listen: Listener | None = None, **settings: Any) -> EvalDone:  # noqa: ANN401 - see EvalConfig
    """Measure a model on tasks; settings are those of `EvalConfig`. Raises as `train` does."""
    config = make_config(EvalConfig, _plain(settings))
    return run_evaluation(config, listen=listen or _ignore)[0]


def _ignore(_: Event) -> None:
    """Nobody listens."""


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a file could hold them."""
    plain = dict(settings)
    for name in _FUNCTIONS:
        if callable(plain.get(name)):
            plain[name] = function_name(plain[name])
    for name in _TASKS:
        value = plain.get(name)
        if isinstance(value, Path):
            plain[name] = str(value)
        elif inspect.isfunction(value):
            plain[name] = function_name(value)
        elif value is not None and not isinstance(value, str):
            plain[name] = _write_tasks(value, name)
    if isinstance(plain.get("train"), list | tuple):
        plain["train"] = ",".join(plain["train"])
    if isinstance(plain.get("air"), Path):
        plain["air"] = str(plain["air"])
    elif isinstance(plain.get("air"), Iterable) and not isinstance(plain["air"], str):
        plain["air"] = _write_rules(plain["air"])
    return plain


def function_name(function: Callable[..., Any]) -> str:
    """`file.py:name` of a function, by which worker processes can import it.

    Raises:
        AgentError: it is not at the top level of a file.

    >>> function_name(function_name).endswith("api.py:function_name")
    True
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        file = None
    module = sys.modules.get(getattr(function, "__module__", ""))
    if file is None or not Path(file).is_file() or getattr(module, name, None) is not function:
        raise AgentError(
            f"{name} cannot be imported by worker processes",
            hint="define it with def, at the top level of a .py file",
        )
    return f"{file}:{name}"


def _write_tasks(tasks: Iterable[object], name: str) -> str:
    file = Path(tempfile.mkdtemp(prefix="fulmen-tasks-")) / f"{name}.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for row in iterable_rows(tasks, name):
            lines.write(json.dumps(row.value) + "\n")
    return str(file)


def _write_rules(rules: Iterable[Rule]) -> str:
    file = Path(tempfile.mkdtemp(prefix="fulmen-rules-")) / "air.json"
    tables = [rule.model_dump(exclude_defaults=True) for rule in rules]
    file.write_text(json.dumps({"rule": tables}), encoding="utf-8")
    return str(file)
