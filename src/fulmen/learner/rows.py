"""Transitions merged into the fewest rows, so that a conversation is computed once.

A call usually continues the one before: its prompt is that prompt, that completion and what the
tools said. Such calls become one row in which every sampled token is trained exactly once, with
the same loss and gradient as training each call alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fulmen.schema.records import Credited


@dataclass(slots=True)
class Row:
    """One sequence for the model. The four lists after `ids` have one entry per trained token."""

    rollout_id: str
    ids: tuple[int, ...]
    positions: list[int] = field(default_factory=list)
    """Index in `ids` of each trained token, rising."""
    advantages: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Behaviour log-probabilities: what the engine recorded, nats."""
    temperatures: list[float] = field(default_factory=list)
    completions: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """The trained tokens again, call by call, each with the grammar it was sampled under."""

    def extends_to(self, prompt: tuple[int, ...]) -> bool:
        """Whether `prompt` is this row and possibly more."""
        return prompt[: len(self.ids)] == self.ids

    def append(self, credited: Credited) -> None:
        """Add a transition whose prompt extends this row (or is its whole beginning)."""
        transition = credited.transition
        start, count = len(transition.prompt_ids), len(transition.completion_ids)
        self.ids = transition.prompt_ids + transition.completion_ids
        self.positions += range(start, start + count)
        self.advantages += [credited.advantage] * count
        self.logprobs += transition.logprobs
        self.temperatures += [transition.temperature] * count
        self.completions.append((transition.grammar, transition.completion_ids))


def merge(credited: Iterable[Credited]) -> list[Row]:
    """Merge each rollout's transitions into maximal chains, in order.

    Where a conversation branches, the first branch keeps the chain and the others start rows of
    their own, with the shared part as context that is not trained again.

    >>> from fulmen.schema.records import Transition
    >>> def call(prompt, completion):
    ...     return Credited(advantage=1.0, transition=Transition(rollout_id="r", call_id="c",
    ...         agent="a", prompt_ids=prompt, completion_ids=completion,
    ...         logprobs=(-1.0,) * len(completion), temperature=1.0, version=0))
    >>> [(row.ids, row.positions) for row in merge([call((1, 2), (3,)), call((1, 2, 3, 4), (5,))])]
    [((1, 2, 3, 4, 5), [2, 4])]
    """
    chains: dict[str, list[Row]] = {}
    for item in credited:
        transition = item.transition
        rows = chains.setdefault(transition.rollout_id, [])
        open_rows = [row for row in rows if row.extends_to(transition.prompt_ids)]
        if open_rows:
            row = max(open_rows, key=lambda row: len(row.ids))
        else:
            row = Row(transition.rollout_id, ())
            rows.append(row)
        row.append(item)
    return [row for rows in chains.values() for row in rows]


def shares(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Split rows into at most `parts` shares of similar size, each rollout whole in one of them.

    Any numbers fit: nothing is dropped for divisibility; fewer rollouts than parts give fewer
    shares.
    """
    by_rollout: dict[str, list[Row]] = {}
    for row in rows:
        by_rollout.setdefault(row.rollout_id, []).append(row)
    result: list[list[Row]] = [[] for _ in range(min(parts, len(by_rollout)))]
    for index, group in enumerate(by_rollout.values()):
        result[index % len(result)] += group
    return result
