"""Sampled tokens put in the place of their rendering: the way on where a format knows none."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from fulmen.gateway.families import Tokens


class Encoder(Tokens, Protocol):
    """A tokenizer in both directions."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an assistant turn."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw text, whose structural tokens are spelled out."""
        ...


def splice(
    tokens: Encoder, served: tuple[int, ...], rendered: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The served tokens and what a new rendering of the longer conversation has behind them.

    None if the rendering leaves something of them out, or goes on within one of its tokens and
    what follows cannot be encoded by itself (some tokenizers put a space before whatever they
    encode).
    """
    before, whole = tokens.spell(served), tokens.spell(rendered)
    if not whole.startswith(before):
        return _by_structure(tokens, served, rendered)
    extended = served + tokens.encode(whole[len(before) :])
    if tokens.spell(extended) != whole:
        lengths = range(len(rendered) + 1)
        end = bisect_left(lengths, len(before), key=lambda n: len(tokens.spell(rendered[:n])))
        extended = served + rendered[end:]
    return extended if tokens.spell(extended) == whole else None


def _by_structure(
    tokens: Encoder, served: tuple[int, ...], rendered: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The served tokens and the turns after them, if a new rendering has the same structure.

    Then nothing was dropped from it, and the texts differ in their spelling only: white space
    around a call, say, or the order of its arguments.
    """
    if served[-1] not in tokens.stop_ids:
        return None
    ends = [place for place, token in enumerate(rendered) if token in tokens.stop_ids]
    turns = sum(token in tokens.stop_ids for token in served)
    if len(ends) < turns:
        return None
    end = ends[turns - 1] + 1
    if _structure(tokens, rendered[:end]) != _structure(tokens, served):
        return None
    return served + rendered[end:]


def _structure(tokens: Tokens, ids: Sequence[int]) -> tuple[list[int], list[str]]:
    """The structural tokens, and the reasoning: some formats drop its text and keep its marks."""
    thoughts = re.findall(r"<think>(.*?)</think>", tokens.spell(ids), re.DOTALL)
    return [t for t in ids if t in tokens.markers], [thought.strip() for thought in thoughts]
