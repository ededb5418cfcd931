"""The outcome in numbers, and what is wrong in words, with the evidence."""

import sys
from pathlib import Path

from crash.audit import Findings
from crash.processes import Killing
from crash.scene import Scene

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from results import result

_MOST = 10
"""Lines of evidence of one sort."""


def tell(scene: Scene, killing: Killing, found: Findings, seconds: float) -> bool:
    """Print everything; returns whether nothing is wrong."""
    name = scene.kind
    result(f"crash.kills.{name}", killing.total, "processes")
    result(f"crash.lost.{name}", len(found.lost), "found")
    result(f"crash.duplicated.{name}", len(found.duplicated), "found")
    print(
        f"{name}: {killing.total} kills in {seconds:.0f} s ({killing.kills}), {found.steps} steps, "
        f"{found.rollouts} rollouts in {found.attempts} attempts, {found.excluded} excluded, "
        f"refused: {found.refused}, slowness {scene.slowness:.1f}",
        flush=True,
    )
    evidence = {
        "lost": found.lost,
        "duplicated": found.duplicated,
        "wrong": found.wrong,
        "ended by themselves": killing.exits,
    }
    for sort, lines in evidence.items():
        for line in lines[:_MOST]:
            print(f"{name}: {sort}: {line}")
        if len(lines) > _MOST:
            print(f"{name}: {sort}: and {len(lines) - _MOST} more")
    fine = not any(evidence.values())
    if not fine:
        print(f"{name}: logs and ledgers are in {scene.folder}", flush=True)
    return fine
