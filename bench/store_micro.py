"""What the store does inside one process, in a SQLite file: enqueue, claim, completion."""

import asyncio
import contextlib
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from sqlalchemy import insert
from sqlalchemy.dialects import sqlite

from fulmen.schema.records import Lease
from fulmen.store import rows, tables
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore
from store_fulmen import DONE, rollouts

ENQUEUED, AT_ONCE = 100_000, 1000
OLD = 1_000_000
CLAIMS = 2000
STEPS, STEP = 8, 128
Told = Callable[[str], None]


@contextlib.asynccontextmanager
async def _store() -> AsyncIterator[tuple[SqlStore, Path]]:
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as folder:
        path = Path(folder) / "run.db"
        store = open_store(path)
        try:
            yield store, path
        finally:
            await store.close()


async def enqueue_s(tell: Told) -> float:
    """Seconds for `ENQUEUED` rollouts, brought as a trainer brings them, `AT_ONCE` at a time."""
    async with _store() as (store, _):
        parts = [rollouts(first, AT_ONCE) for first in range(0, ENQUEUED, AT_ONCE)]
        started = time.perf_counter()
        for part in parts:
            await store.enqueue(part)
        taken = time.perf_counter() - started
    tell(f"{ENQUEUED:,} rollouts queued in {taken:.2f} s")
    return taken


async def claim_p99_ms(tell: Told) -> float:
    """Latency of a claim while there is work, with `OLD` finished rollouts in the file."""
    async with _store() as (store, path):
        started = time.perf_counter()
        await asyncio.to_thread(_fill, path)
        size = path.stat().st_size / 2**20
        tell(
            f"{OLD:,} finished rollouts ({size:.0f} MB) written in "
            f"{time.perf_counter() - started:.0f} s"
        )
        await store.enqueue(rollouts(OLD, CLAIMS))
        taken = []
        for _ in range(CLAIMS):
            started = time.perf_counter()
            (lease,) = await store.claim("bench")
            taken.append(1e3 * (time.perf_counter() - started))
            await store.finish(lease, DONE)
    return _p99("claim", taken, tell)


def _fill(path: Path) -> None:
    """Finished rollouts, each with one attempt, through the store's own tables."""
    outcome = rows.to_text(DONE, "the outcome")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        for first in range(0, OLD, 50_000):
            new = [
                rows.rollout_row(one) | {"status": "succeeded", "attempt": 1, "attempts_before": 0}
                for one in rollouts(first, 50_000)
            ]
            begun: list[rows.Row] = [
                {
                    "rollout_id": row["id"],
                    "attempt": 1,
                    "worker": "bench",
                    "started": 0.0,
                    "ended": 1.0,
                    "outcome": outcome,
                }
                for row in new
            ]
            file.execute("BEGIN")
            for table, many in ((tables.rollouts, new), (tables.attempts, begun)):
                names = list(many[0])
                into = insert(table).values(dict.fromkeys(names))
                statement = str(into.compile(dialect=sqlite.dialect(), column_keys=names))
                file.executemany(statement, ([row[name] for name in names] for row in many))
            file.execute("COMMIT")


async def completion_p99_ms(tell: Told) -> float:
    """From the commit that ends a rollout to the trainer that waits for it.

    `STEP` rollouts are under way at a time, end within 0.3 s of each other, and the trainer waits
    for all that are left.
    """
    committed: dict[str, float] = {}
    taken = []
    async with _store() as (store, _):

        def ended(name: str, _: int) -> None:
            committed[name] = time.perf_counter()

        store.on_attempt_end(ended)
        for step in range(STEPS):
            asked = rollouts(STEP * step, STEP)
            await store.enqueue(asked)
            leases = await store.claim("bench", limit=STEP)
            work = asyncio.gather(*(_end(store, lease) for lease in leases))
            pending = [rollout.id for rollout in asked]
            while pending:
                finished = set(await store.wait_finished(pending))
                now = time.perf_counter()
                # One that is not there yet was seen before the store could tell of it.
                taken += [1e3 * (now - committed.get(name, now)) for name in finished]
                pending = [name for name in pending if name not in finished]
            await work
    return _p99("completion", taken, tell)


async def _end(store: SqlStore, lease: Lease) -> None:
    await asyncio.sleep(random.uniform(0.0, 0.3))
    await store.finish(lease, DONE)


def _p99(what: str, taken: Sequence[float], tell: Told) -> float:
    places = statistics.quantiles(taken, n=100)
    tell(f"{what}: p50 {places[49]:.2f} ms, p99 {places[98]:.2f} ms, longest {max(taken):.2f} ms")
    return places[98]
