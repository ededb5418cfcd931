"""What the process that runs agents and the process that computes say to each other.

Pickled, over a pipe that nobody else can reach: both are one program, and one started the other.
Tokens have a socket of their own (`fulmen.engine.wire`).
"""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulmen.engine.wire import Served
from fulmen.launch.policy import PolicySource
from fulmen.schema.config import RunSettings, ServeConfig
from fulmen.schema.training import TrainConfig


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What the process is to serve, and, with settings of training, to train."""

    settings: RunSettings | ServeConfig
    sources: Sequence[PolicySource]
    frozen: Sequence[PolicySource] = ()
    """Models beside them that are never trained."""
    checkpoint: Path | None = None
    """Where training goes on from."""
    path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    """Where Python looks for modules: losses may be functions of the user's."""

    def folder(self, source: PolicySource) -> str | Path:
        """What a policy is loaded from: with an adapter, the model below it."""
        of_adapter = isinstance(self.settings, TrainConfig) and self.settings.lora_rank is not None
        if self.checkpoint is None or of_adapter or source in self.frozen:
            return source.model
        return self.checkpoint / source.place


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are there."""

    served: Mapping[str, Served]
    """Engines by the names of policies and frozen models."""
    parameters: int
    """Weights of the policies, shared ones once."""
    versions: Mapping[str, int]
    """Of what is trained."""
    why: Sequence[str]
    """Why policies are not trained on trees."""


@dataclass(frozen=True, slots=True)
class Do:
    """Call a method of the learners."""

    method: Callable[..., Any]
    """Say `Learners.save`."""
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The run has come to its end, with this outcome for the other processes of torchrun."""

    outcome: bytes


Order = Do | End


@dataclass(frozen=True, slots=True)
class Done:
    """An order was carried out."""

    value: Any
    versions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Raised:
    """An order could not be carried out, or the plan not be followed."""

    error: Exception


def raised(error: Exception) -> Raised:
    """An error that is being handled, as it can be sent, with a note of where it happened."""
    note = "in the process of the model:\n" + traceback.format_exc()
    room = type(error).__module__.partition(".")[0]
    if room not in ("builtins", "fulmen"):
        # Of a module that may not be there at the other end.
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return Raised(error)
