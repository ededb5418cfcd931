"""The forward pass of layers that have adapters beside them, and who chooses among these.

A layer computes x ↦ W x + scaling · B A x. Several adapters may stand beside one W; a forward pass
is computed with one of them, with none, or row by row with different ones, as this thread has
chosen. So the learner trains one adapter while the engine samples with all of them at once.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fulmen.schema.errors import ModelError

T = TypeVar("T")

_ONLY = ""
"""Where nothing was chosen: the adapter of a model that has one."""

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Rows:
    """Which tokens of a forward pass are computed with which adapter; the rest with none."""

    tokens: int
    """N, of all rows: row by row, as they lie in the input."""
    places: Mapping[str, Tensor]
    """By adapter, its tokens: int64 indices into the N."""

    @classmethod
    def of(cls, adapters: Sequence[str | None], columns: int, device: torch.device) -> "Rows":
        """For P rows of so many columns, each with the adapter that is named for it.

        >>> Rows.of(["a", None, "a"], 2, torch.device("cpu")).places["a"].tolist()
        [0, 1, 4, 5]
        """
        found: dict[str, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                found.setdefault(adapter, []).extend(range(row * columns, (row + 1) * columns))
        places = {name: torch.tensor(own, device=device) for name, own in found.items()}
        return cls(len(adapters) * columns, places)

    @classmethod
    def joined(cls, parts: "Sequence[Rows]") -> "Rows":
        """The rows of all parts, one part after the other.

        >>> one = Rows.of(["a", None], 1, torch.device("cpu"))
        >>> Rows.joined([one, one]).places["a"].tolist()
        [0, 2]
        """
        found: dict[str, list[Tensor]] = {}
        before = 0
        for part in parts:
            for name, own in part.places.items():
                found.setdefault(name, []).append(own + before)
            before += part.tokens
        return cls(before, {name: torch.cat(own) for name, own in found.items()})

    def table(self, adapters: Sequence[str]) -> Tensor:
        """(N, K) float32: 1 where a token is computed with the adapter of the column, else 0.

        >>> Rows.of(["b", None, "a"], 1, torch.device("cpu")).table(["a", "b"]).tolist()
        [[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
        """
        found = torch.zeros(self.tokens, len(adapters))
        for column, name in enumerate(adapters):
            if name in self.places:
                found[self.places[name], column] = 1
        return found


@contextmanager
def chosen(choice: str | Rows | None) -> Iterator[None]:
    """Forward passes of this thread are computed with this adapter, with those of the rows, or
    without any; other threads make their own choice."""
    before = _choice()
    _thread.choice = choice
    try:
        yield
    finally:
        _thread.choice = before


def as_chosen(function: Callable[..., T]) -> Callable[..., T]:
    """A function that computes with what this thread has chosen now, wherever and whenever it is
    called: backward passes, which may compute a layer again, have threads of their own."""
    return functools.partial(_with_choice, _choice(), function)


def adapted_forward(layer: Any, x: Tensor, *inputs: Any, **options: Any) -> Tensor:  # noqa: ANN401 - a layer of PEFT's
    """What a layer of PEFT's computes, as this thread has chosen.

    Raises:
        ModelError: rows are chosen, and the input has others.
    """
    result = layer.base_layer(x, *inputs, **options)
    match _choice():
        case None:
            return result
        case Rows() as rows:
            return _by_rows(layer, x, result, rows)
        case name:
            return (result + _low_rank(layer, name or _only(layer), x)).to(result.dtype)


def is_adapted(layer: nn.Module) -> bool:
    """Whether a layer is one of PEFT's around another."""
    return hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer")


def _choice() -> str | Rows | None:
    return getattr(_thread, "choice", _ONLY)


def _with_choice(
    choice: str | Rows | None,
    function: Callable[..., T],
    *inputs: Any,  # noqa: ANN401 - the function's own
    **options: Any,  # noqa: ANN401 - the function's own
) -> T:
    with chosen(choice):
        return function(*inputs, **options)


def _only(layer: Any) -> str:  # noqa: ANN401
    names = list(layer.lora_A)
    if len(names) != 1:
        raise ValueError(f"one of the adapters {', '.join(names)} has to be chosen")
    return names[0]


def _low_rank(layer: Any, name: str, x: Tensor) -> Tensor:  # noqa: ANN401
    down, up = layer.lora_A[name], layer.lora_B[name]
    return up(down(x.to(down.weight.dtype))) * layer.scaling[name]


def _by_rows(layer: Any, x: Tensor, result: Tensor, rows: Rows) -> Tensor:  # noqa: ANN401
    flat, found = x.reshape(-1, x.shape[-1]), result.reshape(-1, result.shape[-1])
    if len(flat) != rows.tokens:
        raise ModelError("a layer computes other tokens than it was given: no several adapters")
    for name, own in rows.places.items():
        found.index_add_(0, own, _low_rank(layer, name, flat[own]).to(found.dtype))
    return found.view(result.shape)
