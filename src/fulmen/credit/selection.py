"""Which agents are trained: the paper's selective training of one agent among several.

The others sample from the same policy; their calls keep their place in the trajectory and are no
lessons.
"""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from fulmen.schema.records import Call

Selector = Callable[[Call], bool]
"""Whether a call is trained; its agent is filled in."""


def every(_: Call) -> bool:
    """Train all agents."""
    return True


def patterns_of(text: str) -> tuple[str, ...]:
    """Names or patterns (`*`, `?`, `[…]`) from a list with commas.

    >>> patterns_of("writer, re*")
    ('writer', 're*')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def by_name(patterns: Sequence[str]) -> Selector:
    """Train the agents whose name matches one of the patterns."""
    return lambda call: any(fnmatchcase(call.agent, pattern) for pattern in patterns)


def unmatched(patterns: Iterable[str], agents: Iterable[str]) -> list[str]:
    """The patterns that no agent's name matches.

    >>> unmatched(["writer", "chekcer"], ["writer", "checker"])
    ['chekcer']
    """
    names = list(agents)
    return [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
