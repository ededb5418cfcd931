"""Transitions merged into plain sequences, for models whose attention cannot follow a tree.

A call usually continues the one before: its prompt is that prompt, that completion and what the
tools said. Such calls become one sequence, computed once. What several sequences have in common is
computed for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fulmen.learner.trees import Lesson, common_prefix, in_order
from fulmen.schema.records import Credited


@dataclass(frozen=True, slots=True)
class Chains:
    """Sequences of similar length, side by side. B of them, the longest of T tokens."""

    ids: npt.NDArray[np.int64]
    """(B, T) token ids, padded with 0 at the end, where causal attention cannot see it."""
    lessons: tuple[Lesson, ...]
    """`before` counts through the rows: row · T + position."""


_Chain = tuple[npt.NDArray[np.uint32], list[Credited]]
"""A sequence that no other continues, and the calls along it."""


def chain(items: Sequence[Credited], max_tokens: int) -> list[Chains]:
    """Merge calls into the fewest sequences, and these into batches of B × T ≤ `max_tokens`.

    A sequence longer than the bound is alone in its batch. Where a conversation branches, one
    branch takes the shared calls along, and the others have their tokens as context only.

    >>> from fulmen.schema.records import Transition
    >>> def call(prompt, completion):
    ...     return Credited(advantage=1.0, transition=Transition(rollout_id="r", call_id="c",
    ...         agent="a", prompt_ids=prompt, completion_ids=completion,
    ...         logprobs=(-1.0,) * len(completion), temperature=1.0, version=0))
    >>> (batch,) = chain([call((1, 2), (3,)), call((1, 2, 3, 4), (5,)), call((1, 9), (8,))], 99)
    >>> batch.ids.tolist(), [lesson.before.tolist() for lesson in batch.lessons]
    ([[1, 9, 0, 0], [1, 2, 3, 4]], [[1], [5], [7]])
    """
    batches: list[list[_Chain]] = []
    for link in sorted(_merged(items), key=lambda link: len(link[0])):
        if batches and (len(batches[-1]) + 1) * len(link[0]) <= max_tokens:
            batches[-1].append(link)
        else:
            batches.append([link])
    return [_side_by_side(batch) for batch in batches]


def _merged(items: Sequence[Credited]) -> list[_Chain]:
    chains: list[_Chain] = []
    for sequence, item in in_order(items):
        # A beginning comes right before what continues it.
        if chains and common_prefix(chains[-1][0], sequence) == len(chains[-1][0]):
            chains[-1] = (sequence, [*chains[-1][1], item])
        else:
            chains.append((sequence, [item]))
    return chains


def _side_by_side(chains: Sequence[_Chain]) -> Chains:
    width = max(len(sequence) for sequence, _ in chains)
    ids = np.zeros((len(chains), width), dtype=np.int64)
    lessons = []
    for row, (sequence, along) in enumerate(chains):
        ids[row, : len(sequence)] = sequence
        for item in along:
            first = row * width + len(item.transition.prompt_ids) - 1
            count = len(item.transition.completion_ids)
            lessons.append(Lesson(item, np.arange(first, first + count)))
    return Chains(ids, tuple(lessons))
