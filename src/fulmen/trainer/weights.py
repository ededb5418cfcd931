"""Named rewards become one number, by weights that the user states."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fulmen.schema.config import nearest
from fulmen.schema.errors import GraderError

MAIN = "reward"
"""The name of a reward that is the reward itself: a number that is not in a dict has this name."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What the named rewards are multiplied with."""

    values: Mapping[str, float] = field(default_factory=dict)
    rules: Collection[str] = ()
    """Names of rules: no grader has to return them."""

    def combine(self, parts: Mapping[str, float]) -> float:
        """The final reward: the weighted sum.

        A part without a weight counts as it is; beside one called `reward`, it does not count.

        >>> Weights({"f1": 0.9, "format": 0.1}).combine({"f1": 0.5, "format": 1.0})
        0.55
        >>> Weights().combine({"reward": 1.0, "style": 0.5})
        1.0
        """
        shown_only = MAIN in parts
        return math.fsum(
            value * self.values.get(name, 0.0 if shown_only and name != MAIN else 1.0)
            for name, value in parts.items()
        )

    def check(
        self, parts: Mapping[str, float], given: Collection[str], grader: str, task: str
    ) -> None:
        """Find weights that are misspelt: of two names that fit nothing, one is wrong.

        `given` are the names of the agent's own rewards. A name that only fits nothing this time is
        allowed, since agents give rewards when they like; `unseen` finds it in the end.

        Raises:
            GraderError: a part has no weight while a weight has no part.
        """
        lost = [n for n in self.values if n not in parts and n not in given and n not in self.rules]
        bare = [n for n in parts if n not in self.values and n != MAIN]
        if lost and bare:
            raise GraderError(
                f"{grader} returned {', '.join(map(repr, bare))} on task {task!r}, which "
                f"reward_weights does not name; it names {lost[0]!r}, which was not returned",
                hint=nearest(lost[0], bare),
            )

    def unseen(self, seen: Collection[str]) -> list[str]:
        """The weights whose name is neither among `seen` nor that of a rule."""
        return [name for name in self.values if name not in seen and name not in self.rules]


UNWEIGHTED = Weights()
