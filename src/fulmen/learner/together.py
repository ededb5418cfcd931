"""A run's learners in several processes: the first gives orders, the others do the same meanwhile.

An order is a record in msgpack. What every process then does is the plain learner's work: each has
all credited calls, computes its part of the micro-batches, and meets the others in PyTorch's
collectives.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fulmen.learner.learner import Learner
from fulmen.learner.ranks import Ranks
from fulmen.schema.codec import from_msgpack, to_msgpack
from fulmen.schema.records import Credited, Record, Transition


class Order(Record, frozen=True, kw_only=True):
    """What the first process tells the others to do."""

    verb: Literal["learn", "kl", "save", "load", "end"]
    policy: str = ""
    """Whose learner is to do it."""
    credited: tuple[Credited, ...] = ()
    """To learn from."""
    transitions: tuple[Transition, ...] = ()
    """To tell the divergence of."""
    folder: str = ""
    """To save into, or to load from; all processes see the same files."""
    final: bool = True
    """Save a policy that anyone can load."""
    outcome: bytes = b""
    """At the end: what came of it, for who waits for that in another process."""


class LeadingLearner(Learner):
    """The learner of the first process: what it does, all do."""

    def __init__(self, ranks: Ranks, name: str, *arguments: Any, **keywords: Any) -> None:  # noqa: ANN401 - the learner's
        """`name` is the policy's, as the other processes know their learners by."""
        super().__init__(*arguments, **keywords)
        self._ranks = ranks
        self._name = name

    def learn(self, credited: Sequence[Credited]) -> dict[str, float]:
        self._order(Order(verb="learn", policy=self._name, credited=tuple(credited)))
        return super().learn(credited)

    def kl(self, transitions: Sequence[Transition]) -> list[list[float]]:
        self._order(Order(verb="kl", policy=self._name, transitions=tuple(transitions)))
        return super().kl(transitions)

    def save(self, folder: Path, *, final: bool = True) -> None:
        there = str(folder.absolute())
        self._order(Order(verb="save", policy=self._name, folder=there, final=final))
        super().save(folder, final=final)

    def load(self, folder: Path) -> None:
        self._order(Order(verb="load", policy=self._name, folder=str(folder.absolute())))
        super().load(folder)

    def _order(self, order: Order) -> None:
        self._ranks.broadcast(to_msgpack(order))


def end(ranks: Ranks, outcome: bytes) -> None:
    """Let the other processes return from `follow`, with this outcome."""
    ranks.broadcast(to_msgpack(Order(verb="end", outcome=outcome)))


def follow(ranks: Ranks, learners: Mapping[str, Learner]) -> bytes:
    """Do what the first process orders, until it ends; returns the outcome it gave.

    `learners` are this process's, by the names of their policies.
    """
    while True:
        order = from_msgpack(Order, ranks.broadcast())
        if order.verb == "end":
            return order.outcome
        learner = learners[order.policy]
        match order.verb:
            case "learn":
                learner.learn(order.credited)
            case "kl":
                learner.kl(order.transitions)
            case "save":
                learner.save(Path(order.folder), final=order.final)
            case "load":
                learner.load(Path(order.folder))
