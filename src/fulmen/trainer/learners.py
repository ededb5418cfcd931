"""Several policies, trained at once: each learns from the calls that it sampled itself.

Advantages are there before calls are split over policies, so a rollout has one baseline, however
many policies took part in it. One policy is the case of a single learner, and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulmen.schema.records import Credited, Transition


class PolicyLearner(Protocol):
    """What trains one policy: a `Learner`. Spelled out, because PyTorch is not needed here."""

    version: int
    why: str

    def learn(self, credited: Sequence[Credited]) -> dict[str, float]: ...

    def values(self, transitions: Sequence[Transition]) -> list[list[float]]: ...

    def kl(self, transitions: Sequence[Transition]) -> list[list[float]]: ...

    def save(self, folder: Path, *, final: bool = True) -> None: ...

    def load(self, folder: Path) -> None: ...


class Learning(Protocol):
    """What the loop asks of all learners together, wherever they are."""

    @property
    def versions(self) -> dict[str, int]:
        """Of each policy, by name; the first is that of agents without one of their own."""
        ...

    def learn(self, credited: Sequence[Credited]) -> dict[str, float]:
        """Take one training step; returns its metrics."""
        ...

    def values(self, transitions: Sequence[Transition]) -> list[list[float]]:
        """What critics foresee just before each completion token, in the order given."""
        ...

    def kl(self, transitions: Sequence[Transition]) -> list[list[float]]:
        """Divergence from the reference at each completion token, nats, in the order given."""
        ...

    def save(self, checkpoint: Path, *, final: bool = True) -> None:
        """Write every policy into its place within an existing folder."""
        ...


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy with what trains it."""

    name: str
    """As the calls that it sampled carry it."""
    learner: PolicyLearner
    save_model: Callable[[Path], None]
    """Write everything but the learner's part of a checkpoint: the tokenizer."""
    place: str = "."
    """Its folder within a checkpoint."""


class Learners:
    """All policies of a run; the first is that of agents without one of their own."""

    def __init__(self, policies: Sequence[Trained]) -> None:
        """Raises ValueError if there is none, or two have the same name or place."""
        self._policies = {policy.name: policy for policy in policies}
        places = {policy.place for policy in policies}
        if not policies or not len(policies) == len(self._policies) == len(places):
            raise ValueError("policies need names and places of their own")

    @property
    def versions(self) -> dict[str, int]:
        """Of each policy, by name."""
        return {name: policy.learner.version for name, policy in self._policies.items()}

    @property
    def why(self) -> list[str]:
        """Why policies are not trained on trees, each reason once."""
        reasons = (policy.learner.why for policy in self._policies.values())
        return list(dict.fromkeys(reason for reason in reasons if reason))

    def learn(self, credited: Sequence[Credited]) -> dict[str, float]:
        """Give each learner its policy's calls, and return the metrics of all.

        A single policy's metrics are named as the learner names them; of several, `learn/loss` of
        `writer` is `learn/writer/loss`.
        """
        shares = self._split([item.transition for item in credited])
        metrics: dict[str, float] = {}
        for name, places in shares.items():
            learned = self._policies[name].learner.learn([credited[place] for place in places])
            metrics |= learned if len(shares) == 1 else named(learned, name)
        return metrics

    def values(self, transitions: Sequence[Transition]) -> list[list[float]]:
        """What critics foresee, each of its own policy's calls; see `Learner.values`."""
        return self._each(transitions, lambda learner, own: learner.values(own))

    def kl(self, transitions: Sequence[Transition]) -> list[list[float]]:
        """Each policy's divergence from its reference; see `Learner.kl`."""
        return self._each(transitions, lambda learner, own: learner.kl(own))

    def save(self, checkpoint: Path, *, final: bool = True) -> None:
        """Write every policy into its place within an existing folder; see `Learner.save`."""
        for policy in self._policies.values():
            folder = checkpoint / policy.place
            folder.mkdir(parents=True, exist_ok=True)
            policy.learner.save(folder, final=final)
            policy.save_model(folder)

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint; the weights come with the models."""
        for policy in self._policies.values():
            policy.learner.load(checkpoint / policy.place)

    def _each(
        self,
        transitions: Sequence[Transition],
        ask: Callable[[PolicyLearner, Sequence[Transition]], list[list[float]]],
    ) -> list[list[float]]:
        found: dict[int, list[float]] = {}
        for name, places in self._split(transitions).items():
            if places:
                own = ask(self._policies[name].learner, [transitions[p] for p in places])
                found |= zip(places, own, strict=True)
        return [found[place] for place in range(len(transitions))]

    def _split(self, transitions: Sequence[Transition]) -> dict[str, list[int]]:
        """Places of each policy's calls, in order.

        Raises:
            ValueError: a call is of none; it should not have been credited.
        """
        shares: dict[str, list[int]] = {name: [] for name in self._policies}
        for place, transition in enumerate(transitions):
            if transition.policy not in shares:
                raise ValueError(f"call {transition.call_id} is of policy {transition.policy!r}")
            shares[transition.policy].append(place)
        return shares


def named(metrics: Mapping[str, float], policy: str) -> dict[str, float]:
    """Metrics as those of one policy among several.

    >>> named({"learn/loss": 0.5}, "writer")
    {'learn/writer/loss': 0.5}
    """
    parts = {name: name.partition("/") for name in metrics}
    return {f"{parts[name][0]}/{policy}/{parts[name][2]}": v for name, v in metrics.items()}
