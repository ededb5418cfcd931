"""A process of the model with the Calc example's, and orders that it can be given."""

import os
import threading
from pathlib import Path

from fulmen.launch.host_orders import HostPlan
from fulmen.launch.policy import main_source
from fulmen.schema.config import ServeConfig, make_config
from fulmen.schema.errors import DataError

BASE = Path(__file__).resolve().parents[1] / "examples" / "calc" / "base"


class Unpicklable(Exception):
    """Cannot be made again from its message alone."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def plan_of(model: Path | str = BASE) -> HostPlan:
    settings = make_config(ServeConfig, {"model": str(model), "threads": 1})
    return HostPlan(settings, [main_source(str(model))])


def refuse(_: object, text: str) -> None:
    raise DataError(text, hint="do this")


def fail_oddly(_: object) -> None:
    raise Unpicklable("odd", "ly")


def write_to(_: object, file: Path) -> None:
    """Say that an order is under way, and never come back."""
    file.touch()
    threading.Event().wait()


def speak(_: object) -> int:
    print("for nobody")
    return os.getpid()
