"""Rollouts of the three mini agents as the learner gets them: one real step of each experiment."""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from fulmen.credit.advantage import credit
from fulmen.credit.trajectory import assemble
from fulmen.schema.records import Credited, RolloutResult
from fulmen.store.open import open_store

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from trial import command, load


def recorded(name: str) -> list[Credited]:
    """The credited calls of one step of `calc`, `sql` or `rag`, sampled by its base model."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        example = load(name)
        example.prepare()
        settings = {**example.recipe(), "steps": 1, "seed": 0}
        del settings["val"]
        subprocess.run(command(settings, run), check=True, stdout=subprocess.DEVNULL)
        return asyncio.run(_credited(run))


async def _credited(run: Path) -> list[Credited]:
    store = open_store(run / "run.db")
    try:
        (step,) = await store.steps()
        results = await store.results(step.consumed)
    finally:
        await store.close()
    return credit([assemble(result, _reward(result))[0] for result in results])


def _reward(result: RolloutResult) -> float:
    """What the grader gave it."""
    return sum(r.value for r in result.rewards if r.source == "grader" and r.name == "reward")
