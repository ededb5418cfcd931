"""How much memory a process gains while rollouts pass through its store.

Each is queued, claimed, has a call and two spans (start, then end, of each), is finished, read by
the trainer, rewarded, and consumed by a step, as in a run. The file is on disk; nothing of a
finished rollout should stay in memory. Resident memory after the first tenth is compared with the
highest afterwards:

    python bench/store_growth.py
"""

import argparse
import asyncio
import gc
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from fulmen.schema.records import (
    Call,
    Lease,
    Outcome,
    Reward,
    Rollout,
    Span,
    StepRecord,
    Task,
    VersionSpan,
)
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore
from results import result

STEP = 500
"""Rollouts of a step."""
TOKENS = 200
"""Of a prompt; as many of a completion."""


async def pass_through(store: SqlStore, step: int) -> None:
    """One step's rollouts, from the queue to consumption."""
    task = Task(id="t", input={"question": "1+1?"})
    names = [f"{step:06d}-{n:06d}" for n in range(STEP)]
    await store.enqueue([Rollout(id=name, task=task, group=name, step=step) for name in names])
    while leases := await store.claim("w", limit=100):
        await store.record_calls([_call(lease) for lease in leases])
        await store.record_spans(list(_spans(leases, ended=None)))
        await store.record_spans(list(_spans(leases, ended=2.0)))
        await asyncio.gather(*(store.finish(lease, Outcome(output="2")) for lease in leases))
    await store.wait_finished(names)
    found = await store.results(names)
    await store.add_rewards(
        [
            Reward(rollout_id=one.rollout.id, attempt=one.attempt, value=1.0, source="grader")
            for one in found
        ]
    )
    metrics = {"reward/mean": 1.0}
    await store.commit_step(
        StepRecord(step=step, version=step, consumed=tuple(names), metrics=metrics)
    )


def _call(lease: Lease) -> Call:
    return Call(
        id="chatcmpl-1",
        rollout_id=lease.rollout.id,
        attempt=lease.attempt,
        index=0,
        protocol="chat",
        prompt_ids=tuple(range(TOKENS)),
        completion_ids=tuple(range(TOKENS)),
        logprobs=(-0.5,) * TOKENS,
        versions=(VersionSpan(start=0, version=1),),
        temperature=1.0,
        top_p=1.0,
        finish_reason="stop",
        request={"messages": [{"role": "user", "content": "1+1? " * 100}]},
        response={"role": "assistant", "content": "2"},
    )


def _spans(leases: Iterable[Lease], ended: float | None) -> Iterable[Span]:
    for lease in leases:
        for name in ("agent", "tool"):
            yield Span(
                id=name,
                rollout_id=lease.rollout.id,
                attempt=lease.attempt,
                name=name,
                attributes={"gen_ai.tool.name": name},
                started=1.0,
                ended=ended,
            )


def growth(rollouts: int = 100_000, *, where: str | None = None) -> float:
    """MiB of resident memory gained after the first tenth of the rollouts, at most.

    `where`: a place for the store, as `open_store` takes it; None: a file that is gone afterwards.
    """
    process = psutil.Process()

    async def run(place: str) -> float:
        store = open_store(place)
        first, most = 0.0, 0.0
        for step in range(1, rollouts // STEP + 1):
            await pass_through(store, step)
            if step * STEP == rollouts // 10:
                gc.collect()
                first = most = process.memory_info().rss / 2**20
            most = max(most, process.memory_info().rss / 2**20)
        await store.close()
        return most - first

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(where or str(Path(folder) / "run.db")))


def main() -> None:
    """Print the figure, and how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=100_000)
    rollouts = parser.parse_args().rollouts
    started = time.perf_counter()
    gained = growth(rollouts)
    name = f"store.growth_mb_{rollouts // 1000}k"
    result(name, gained, "MiB", higher_is_better=False)
    print(f"{rollouts / (time.perf_counter() - started):.0f} rollouts a second")


if __name__ == "__main__":
    main()
