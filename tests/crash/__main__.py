"""`python -m crash --rounds 300 postgresql http+sqlite http+postgresql`."""

import argparse
import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from crash.audit import Findings, audit
from crash.line import break_often
from crash.processes import Killing, Life
from crash.report import tell
from crash.scene import WORKERS, Scene, slowness
from crash.server import serve
from crash.trainer import train
from crash.worker import work
from databases import Postgres, free_port

KINDS = ("postgresql", "http+sqlite", "http+postgresql")
_STUCK_S = 120.0
"""If no step comes to its end for so long, seconds, something waits for ever."""
_UNDISTURBED = 2
"""Steps after the last kill."""


def _lives(scene: Scene) -> list[Life]:
    """Who is killed, and how often on average, seconds."""
    lives = [
        Life("server", serve, scene, 6.0, below=False),
        Life("trainer", train, scene, 16.0, below=False),
        *(Life(f"worker-{n}", work, scene, 4.0, below=False) for n in range(WORKERS)),
    ]
    if scene.line_port != scene.port:
        lives.append(Life("line", break_often, scene, 30.0, below=False))
    return lives


def _steps(scene: Scene) -> int:
    metrics = scene.run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def run(scene: Scene, rounds: int) -> tuple[Killing, Findings]:
    """Kill so many processes of a run, let it come to an end, and look at what is left."""
    for folder in (scene.ledgers, scene.folder / "logs"):
        folder.mkdir(parents=True)
    killing = Killing(_lives(scene), scene.chance("who"))
    patience = _STUCK_S * scene.slowness
    moved, steps, told, undisturbed = time.monotonic(), 0, 0.0, 0
    try:
        while undisturbed < _UNDISTURBED:
            killing.turn(killing=killing.total < rounds)
            now = time.monotonic()
            if _steps(scene) != steps:
                steps, moved = _steps(scene), now
                undisturbed += killing.total >= rounds
            if now - told > 2:
                told = now
                print(f"{scene.kind}: {killing.total} kills, {steps} steps", file=sys.stderr)
            if now - moved > patience:
                return killing, Findings(lost=[f"no step has ended for {patience:.0f} s"])
        if not killing.ask_to_stop("trainer", patience):
            return killing, Findings(lost=[f"the last step does not end within {patience:.0f} s"])
    finally:
        killing.end()
    return killing, asyncio.run(audit(scene))


def main() -> int:
    """Run each kind; returns 1 if anything is wrong with one of them."""
    parser = argparse.ArgumentParser(prog="crash", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=60, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave nothing running
    kinds = options.kinds or KINDS
    postgres = Postgres() if any(kind.endswith("postgresql") for kind in kinds) else None
    outcomes = []
    try:
        for kind in kinds:
            folder = Path(tempfile.mkdtemp(prefix=f"fulmen-crash-{kind}-"))
            place = postgres.url() if postgres and kind != "http+sqlite" else str(folder / "run.db")
            port = free_port()
            line_port = free_port() if kind.startswith("http+") else port
            scene = Scene(kind, folder, place, port, line_port, options.seed, slowness())
            began = time.monotonic()
            killing, found = run(scene, options.rounds)
            fine = tell(scene, killing, found, time.monotonic() - began)
            outcomes.append(fine)
            if fine:
                shutil.rmtree(folder)
    finally:
        if postgres:
            postgres.remove()
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
