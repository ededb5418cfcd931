"""What the agents wrote down of their attempts, read back."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Entry:
    """One attempt as its agent saw it."""

    began: int = 0
    """How often it was begun; more than once is a number given out twice."""
    calls: list[str] = field(default_factory=list)
    """Ids of the answers that it received, in order."""
    spans: list[str] = field(default_factory=list)
    rewards: list[int] = field(default_factory=list)
    """One for each turn."""
    ended: int | None = None
    """What it returned."""
    raised: bool = False


Ledger = dict[tuple[str, int], Entry]
"""By rollout and attempt."""


def read_ledger(folder: Path) -> Ledger:
    """All attempts of a run, those that came to nothing included."""
    found: Ledger = {}
    for line in _lines(folder):
        entry = found.setdefault((line["rollout"], line["attempt"]), Entry())
        match line["what"]:
            case "began":
                entry.began += 1
            case "call":
                entry.calls.append(line["value"])
            case "span":
                entry.spans.append(line["value"])
            case "reward":
                entry.rewards.append(line["value"])
            case "ended":
                entry.ended = line["value"]
            case "raised":
                entry.raised = True
    return found


def _lines(folder: Path) -> Iterator[dict]:
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):  # the last one of a killed process may be cut off
                yield json.loads(text)
