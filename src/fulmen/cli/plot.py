"""Curves in a terminal."""

import itertools
import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as bars between the lowest and the highest; means where there are too many.

    >>> sparkline([0.0, 0.5, 1.0], 8)
    '▁▅█'
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    shown = bins(known, width)
    low, high = min(shown), max(shown)
    span = high - low or 1.0
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in shown)


def bins(values: Sequence[float], count: int) -> list[float]:
    """At most `count` means of equal stretches.

    >>> bins([1.0, 2.0, 3.0, 4.0], 2)
    [1.5, 3.5]
    """
    count = min(count, len(values))
    edges = [round(place * len(values) / count) for place in range(count + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]


def plot(values: Sequence[float], *, width: int = 60, height: int = 8, top: float = 1.0) -> str:
    """A filled curve with its axis, from 0 to at least `top`; lines joined by newlines.

    >>> print(plot([0.0, 0.5, 1.0], width=3, height=2))
     1.00 │  █
     0.00 │ ██
          └───
    """
    known = [value if math.isfinite(value) else 0.0 for value in values]
    if not known:
        return ""
    shown = bins(known, width)
    high = max(top, *shown)
    levels = [max(0.0, value) / high * height for value in shown]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(_cell(level - row) for level in levels)
        edge = high if row == height - 1 else 0.0
        label = f"{edge:5.2f}" if row in (height - 1, 0) else " " * 5
        lines.append(f"{label} │{cells}")
    return "\n".join([*lines, f"{' ' * 5} └{'─' * len(shown)}"])


def _cell(filled: float) -> str:
    if filled <= 0:
        return " "
    return _BLOCKS[min(len(_BLOCKS), max(1, round(filled * len(_BLOCKS)))) - 1]
