"""Transitions merged into prefix trees, so that every distinct position is computed once.

A call repeats its whole context, and so do the calls after it and the other rollouts of its group:
trained one by one, most of what is computed has been computed before. Here contexts with equal
beginnings share them. Sorted as strings, the sequences stand in the depth-first order of their
trees, each next to the one it shares most with; so building the trees, packing several of them
together and cutting one that is too large are one pass over the sorted list.

Idea: Tree Training, arXiv 2511.00413.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fulmen.schema.errors import DataError
from fulmen.schema.records import Credited

Ints = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """A run of tokens without a branch: start … end − 1 of a forest."""

    start: int
    end: int
    parent: int
    """Index of the segment it continues; −1 begins a tree."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A credited call, with its place in a batch."""

    item: Credited
    before: Ints
    """(n,) for each completion token, the position whose output predicts it."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Prefix trees in depth-first order. T positions, S segments."""

    ids: Ints
    """(T,) token ids. The last token of a call is here only if another call goes on after it."""
    depths: Ints
    """(T,) how many tokens stand before it in its own sequence."""
    segments: tuple[Segment, ...]
    """(S,) by start; a parent comes before its children."""
    lessons: tuple[Lesson, ...]

    def paths(self) -> list[Ints]:
        """For each segment, the positions from the root of its tree to its own end."""
        found: list[Ints] = []
        for start, end, parent in self.segments:
            own = np.arange(start, end)
            found.append(own if parent < 0 else np.concatenate([found[parent], own]))
        return found

    def subtree_ends(self) -> Ints:
        """(T,) for each position, where the depth-first run of those that descend from it ends."""
        ends = np.full(len(self.ids), len(self.ids), dtype=np.int64)
        open_segments: list[int] = []
        for index, segment in enumerate(self.segments):
            while open_segments and open_segments[-1] != segment.parent:
                closed = self.segments[open_segments.pop()]
                ends[closed.start : closed.end] = segment.start
            open_segments.append(index)
        return ends


def plant(items: Sequence[Credited], max_tokens: int) -> list[Forest]:
    """Merge calls into forests of at most `max_tokens` positions.

    Neighbours share as much as they can; where a tree does not fit, the path to the cut is computed
    on both sides of it. A single sequence longer than the bound has a forest of its own. Calls
    without a completion are no lessons.

    Raises:
        DataError: a call has no prompt, so nothing predicts its first token.

    >>> from fulmen.schema.records import Transition
    >>> def call(prompt, completion):
    ...     return Credited(advantage=1.0, transition=Transition(rollout_id="r", call_id="c",
    ...         agent="a", prompt_ids=prompt, completion_ids=completion,
    ...         logprobs=(-1.0,) * len(completion), temperature=1.0, version=0))
    >>> (tree,) = plant([call((1, 2), (3, 9)), call((1, 2, 3, 9, 4), (5,)), call((1, 7), (8,))], 99)
    >>> tree.ids.tolist(), tree.depths.tolist()
    ([1, 2, 3, 9, 4, 7], [0, 1, 2, 3, 4, 1])
    >>> [tuple(segment) for segment in tree.segments]
    [(0, 1, -1), (1, 5, 0), (5, 6, 0)]
    >>> [lesson.before.tolist() for lesson in tree.lessons]
    [[1, 2], [4], [5]]
    """
    forests: list[Forest] = []
    growing = _Growing()
    last = np.empty(0, dtype=">u4")
    for sequence, item in in_order(items):
        shared = common_prefix(last, sequence)
        if growing.size and growing.size + len(sequence) - shared > max_tokens:
            forests.append(growing.done())
            growing, shared = _Growing(), 0
        growing.add(sequence, shared, item)
        last = sequence
    return [*forests, growing.done()] if growing.size else forests


def in_order(items: Sequence[Credited]) -> list[tuple[npt.NDArray[np.uint32], Credited]]:
    """What each call is computed from, prompt and all but the last completion token, sorted.

    Big-endian bytes compare as the token ids do, and a beginning comes before what continues it.
    """
    sequences: list[tuple[bytes, int]] = []
    for index, item in enumerate(items):
        prompt, completion = item.transition.prompt_ids, item.transition.completion_ids
        if not prompt:
            raise DataError(f"call {item.transition.call_id} has an empty prompt")
        if completion:
            sequence = np.array(prompt + completion[:-1], dtype=">u4")
            sequences.append((sequence.tobytes(), index))
    sequences.sort()
    return [(np.frombuffer(text, dtype=">u4"), items[index]) for text, index in sequences]


def common_prefix(one: npt.NDArray[np.uint32], other: npt.NDArray[np.uint32]) -> int:
    """How many tokens two sequences begin with alike.

    >>> common_prefix(np.array([1, 2, 3], ">u4"), np.array([1, 2, 4, 5], ">u4"))
    2
    """
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


@dataclass(slots=True)
class _Growing:
    """A forest being built from sorted sequences."""

    size: int = 0
    _ids: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    _depths: list[Ints] = field(default_factory=list)
    _path: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Positions of the sequence added last."""
    _origins: dict[int, int] = field(default_factory=dict)
    """Where segments begin, to the position each continues (−1: none)."""
    _lessons: list[Lesson] = field(default_factory=list)

    def add(self, sequence: npt.NDArray[np.uint32], shared: int, item: Credited) -> None:
        """Add a sequence of which the last one has the first `shared` tokens, too."""
        fresh = len(sequence) - shared
        if fresh and (shared < len(self._path) or not self.size):
            origin = int(self._path[shared - 1]) if shared else -1
            self._origins[self.size] = origin
            if shared:  # what went on there before is now one branch of two
                self._origins.setdefault(int(self._path[shared]), origin)
        new = np.arange(self.size, self.size + fresh)
        self._path = np.concatenate([self._path[:shared], new])
        self._ids.append(sequence[shared:])
        self._depths.append(np.arange(shared, len(sequence)))
        self.size += fresh
        prompt = len(item.transition.prompt_ids)
        self._lessons.append(Lesson(item, self._path[prompt - 1 :]))

    def done(self) -> Forest:
        starts = sorted(self._origins)
        ends = [*starts[1:], self.size]
        return Forest(
            ids=np.concatenate(self._ids).astype(np.int64),
            depths=np.concatenate(self._depths),
            segments=tuple(
                Segment(start, end, bisect_right(starts, self._origins[start]) - 1)
                for start, end in zip(starts, ends, strict=True)
            ),
            lessons=tuple(self._lessons),
        )
