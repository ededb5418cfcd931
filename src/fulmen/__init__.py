"""Fulmen trains any AI agent with reinforcement learning.

    import fulmen
    fulmen.train(agent="my_agent.py:solve", tasks="train.jsonl", grader="my_grader.py:score",
                 model="my-model", group_size=8)

Keyword arguments are the settings of `fulmen train` (`fulmen.TrainConfig`), by the same names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulmen.credit.rules import Rule as Rule
    from fulmen.launch.api import evaluate as evaluate
    from fulmen.launch.api import train as train
    from fulmen.runner.reward import reward as reward
    from fulmen.schema.config import EvalConfig as EvalConfig
    from fulmen.schema.errors import FulmenError as FulmenError
    from fulmen.schema.records import RolloutResult as RolloutResult
    from fulmen.schema.records import Task as Task
    from fulmen.schema.training import TrainConfig as TrainConfig

__version__ = "0.1.0"

_PLACES = {
    "EvalConfig": "fulmen.schema.config",
    "FulmenError": "fulmen.schema.errors",
    "RolloutResult": "fulmen.schema.records",
    "Rule": "fulmen.credit.rules",
    "Task": "fulmen.schema.records",
    "TrainConfig": "fulmen.schema.training",
    "evaluate": "fulmen.launch.api",
    "reward": "fulmen.runner.reward",
    "train": "fulmen.launch.api",
}

__all__ = [
    "EvalConfig",
    "FulmenError",
    "RolloutResult",
    "Rule",
    "Task",
    "TrainConfig",
    "evaluate",
    "reward",
    "train",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    """Import public names when they are first used: torch is not loaded by `import fulmen`."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fulmen' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
