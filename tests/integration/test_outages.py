"""What goes away and comes back: room on the disk, the database, the time of day, the network."""

import asyncio
import contextlib
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from sqlalchemy import Engine, event
from starlette.applications import Starlette

from databases import Postgres, Proxy
from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.runner.store_client import StoreClient
from fulmen.schema.errors import LeaseLost, StoreError
from fulmen.schema.keys import read_key
from fulmen.schema.records import Call, Lease, Outcome, Retry, Reward, Rollout, StepRecord, Task
from fulmen.schema.role_keys import make_role_keys
from fulmen.server.http import Listening
from fulmen.server.store_api import StoreApi
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore

WAIT_S = 60.0
"""Longer than any of these tests takes."""
HOURS_S = 5 * 3600.0


def rollout(name: str, **changes) -> Rollout:
    return Rollout(id=name, task=Task(id="t", input={}), group="g", step=1, **changes)


def call(lease: Lease, size: int = 0) -> Call:
    return Call(
        id="c",
        rollout_id=lease.rollout.id,
        attempt=lease.attempt,
        index=0,
        protocol="chat",
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(-0.5,),
        versions=(),
        temperature=1.0,
        top_p=1.0,
        finish_reason="stop",
        request="x" * size,
    )


async def until(true: Callable[[], bool]) -> None:
    """Return when it is so."""
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.01)


# --- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder with room for a megabyte, and what makes room.

    A file system of its own where that may be mounted, else SQLite's own bound.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    with contextlib.suppress(OSError):
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            more = ["mount", "-o", "remount,size=100m", str(folder)]
            yield folder, lambda: subprocess.run(more, check=True) and None
            subprocess.run(["umount", str(folder)], check=True)
            return

    def bound(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 250")

    event.listen(Engine, "connect", bound)
    yield folder, lambda: event.remove(Engine, "connect", bound)
    if event.contains(Engine, "connect", bound):
        event.remove(Engine, "connect", bound)


FULL = r"run\.db: no space left on device; free some space and resume"


async def test_a_disk_that_fills_up_under_load_loses_nothing_that_was_confirmed(small_disk):
    folder, make_room = small_disk
    store = open_store(folder / "run.db")
    names = [f"r{n}" for n in range(300)]
    await store.enqueue([rollout(name) for name in names])
    confirmed: set[str] = set()

    async def work(worker: str) -> None:
        while True:
            for lease in await store.claim(worker):
                await store.record_calls([call(lease, 10_000)])
                await store.finish(lease, Outcome(output=lease.rollout.id))
                confirmed.add(lease.rollout.id)

    ends = await asyncio.gather(*(work(f"w{n}") for n in range(8)), return_exceptions=True)
    with pytest.raises(StoreError, match=FULL):
        await store.counts()
    with pytest.raises(StoreError, match=FULL):
        await store.close()
    assert {type(end) for end in ends} == {StoreError}
    assert {str(end) for end in ends} == {f"{folder}/{FULL}".replace("\\", "")}
    assert 0 < len(confirmed) < len(names)

    make_room()
    with contextlib.closing(sqlite3.connect(folder / "run.db")) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    store = open_store(folder / "run.db")
    results = await store.results(names)
    assert {result.rollout.id for result in results} == confirmed
    assert all(result.outcome.output == result.rollout.id for result in results)
    assert {len(result.calls) for result in results} == {1}
    await store.expire_leases(now=float("inf"))
    rest = await store.claim("w", limit=len(names))
    assert {lease.rollout.id for lease in rest} == set(names) - confirmed
    for lease in rest:
        await store.record_calls([call(lease, 10_000)])
        await store.finish(lease, Outcome())
    assert (await store.counts())["succeeded"] == len(names)
    await store.close()


# --- a database that is restarted


async def test_steps_are_committed_once_while_the_database_is_restarted(postgres: Postgres):
    store = open_store(postgres.url())
    names = [f"r{n}" for n in range(60)]
    await store.enqueue([rollout(name) for name in names])
    for lease in await store.claim("w", limit=len(names)):
        await store.finish(lease, Outcome())
    committed = asyncio.Event()

    async def restart() -> None:
        for _ in range(2):
            committed.clear()
            await committed.wait()
            await asyncio.to_thread(postgres.stop)
            await asyncio.to_thread(postgres.start)

    restarting = asyncio.create_task(restart())
    step = 0
    while not restarting.done():
        step += 1
        for place in range(10 * step - 10, 10 * step):
            name = f"r{place % len(names)}"
            await store.add_rewards(
                [Reward(rollout_id=name, attempt=1, value=place, source="grader")]
            )
        consumed = tuple(names[10 * step - 10 : 10 * step])
        record = StepRecord(step=step, version=step, consumed=consumed, metrics={})
        await store.commit_step(record)
        committed.set()
    await restarting
    records = await store.steps()
    assert [record.step for record in records] == list(range(1, step + 1))
    consumed = [name for record in records for name in record.consumed]
    assert consumed == names[: len(consumed)]
    assert {len(result.rewards) for result in await store.results(consumed)} == {1}
    await store.close()


# --- a clock that jumps


class Clock:
    """The time of day, which can be set."""

    def __init__(self) -> None:
        self._real, self.off_s = time.time, 0.0

    def __call__(self) -> float:
        return self._real() + self.off_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of this process, from here on."""
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


@pytest.fixture(params=["sqlite", "postgresql"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: Postgres
) -> AsyncIterator[SqlStore]:
    store = open_store(tmp_path / "run.db" if request.param == "sqlite" else postgres.url())
    yield store
    await store.close()


@pytest.mark.parametrize("off_s", [HOURS_S, -HOURS_S])
async def test_attempts_go_on_when_the_clock_is_set(store: SqlStore, clock: Clock, off_s: float):
    await store.enqueue([rollout("a"), rollout("b")])
    leases = await store.claim("w", limit=2)
    clock.off_s = off_s
    assert await store.expire_leases() == []
    assert await store.heartbeat(leases) == []
    assert await store.expire_leases() == []
    for lease in leases:
        assert read_key(lease.key, store.secret).rollout_id == lease.rollout.id
        assert await store.finish(lease, Outcome()) == "succeeded"


@pytest.mark.parametrize("off_s", [HOURS_S, -HOURS_S])
async def test_a_lost_worker_is_noticed_when_the_clock_is_set(
    store: SqlStore, clock: Clock, off_s: float
):
    await store.enqueue([rollout("a")])
    began = time.monotonic()
    await store.claim("w", lease_s=0.3)
    clock.off_s = off_s
    while not await store.expire_leases():
        assert time.monotonic() < began + WAIT_S
    assert time.monotonic() >= began + 0.25
    (lease,) = await store.claim("w2")
    assert lease.attempt == 2


@pytest.mark.parametrize("off_s", [HOURS_S, -HOURS_S])
async def test_a_rollout_rests_as_long_as_was_said_when_the_clock_is_set(
    store: SqlStore, clock: Clock, off_s: float
):
    await store.enqueue([rollout("a", retry=Retry(pause_s=0.3))])
    (lease,) = await store.claim("w")
    began = time.monotonic()
    assert await store.finish(lease, Outcome(failure="infrastructure")) == "queued"
    clock.off_s = off_s
    assert await store.claim("w") == []
    (again,) = await store.claim("w", wait_s=WAIT_S)
    assert again.attempt == 2
    assert 0.25 < time.monotonic() - began < WAIT_S


@pytest.mark.parametrize("off_s", [HOURS_S, -HOURS_S])
async def test_waits_last_as_long_as_was_said_when_the_clock_is_set(
    store: SqlStore, clock: Clock, off_s: float
):
    await store.enqueue([rollout("a")])
    await store.claim("w")
    began = time.monotonic()
    claiming = asyncio.create_task(store.claim("w", wait_s=0.3))
    finishing = asyncio.create_task(store.wait_finished(["a"], timeout_s=0.3))
    await asyncio.sleep(0)
    clock.off_s = off_s
    assert (await claiming, await finishing) == ([], [])
    assert 0.25 < time.monotonic() - began < WAIT_S


# --- a network that is cut


AGENT = """
import pathlib, time
folder = pathlib.Path(__file__).parent
def solve(task):
    with (folder / "began").open("a") as file:
        file.write("x")
    while not (folder / "go").exists():
        time.sleep(0.01)
    return 7
"""


@contextlib.asynccontextmanager
async def working(folder: Path, lease_s: float) -> AsyncIterator[tuple[SqlStore, Pool, Proxy]]:
    """A server's store, and a pool that has it through a network that can be cut."""
    (folder / "agent.py").write_text(AGENT)
    here = open_store(folder / "run.db")
    keys = make_role_keys(here.secret)
    api = StoreApi(here, keys)
    async with Listening(Starlette(routes=api.routes()), "127.0.0.1", 0) as server, aclosing(api):
        proxy = Proxy(server.port)
        there = StoreClient(f"http://127.0.0.1:{proxy.port}", keys.admin)
        agent = parse_agent(f"{folder}/agent.py:solve")
        options = {"base_url": "http://127.0.0.1:9", "workers": 1, "processes": 1}
        async with Pool(there, agent, lease_s=lease_s, **options) as pool:
            yield here, pool, proxy
        await there.close()
        proxy.close()
    await here.close()


async def test_a_cut_that_is_shorter_than_the_lease_is_a_delay_and_nothing_else(tmp_path, caplog):
    async with working(tmp_path, lease_s=30.0) as (store, pool, proxy):
        await store.enqueue([rollout("a")])
        await until((tmp_path / "began").exists)
        proxy.cut()
        (tmp_path / "go").touch()
        await until(lambda: "is away" in caplog.text)
        assert await store.expire_leases() == []
        proxy.open = True
        assert await store.wait_finished(["a"], timeout_s=WAIT_S) == ["a"]
        await until(lambda: pool.counters.running == 0)
        assert (pool.counters.finished, pool.counters.refused) == (1, 0)
        (result,) = await store.results(["a"])
        assert (result.attempt, result.outcome.output) == (1, 7)
        assert (await store.counts())["refused_results"] == 0


async def test_after_a_cut_that_is_longer_than_the_lease_the_late_result_is_refused(tmp_path):
    async with working(tmp_path, lease_s=1.0) as (store, pool, proxy):
        await store.enqueue([rollout("a")])
        await until((tmp_path / "began").exists)
        proxy.cut()
        while not await store.expire_leases():
            await asyncio.sleep(0.01)
        (second,) = await store.claim("elsewhere", lease_s=WAIT_S)
        assert second.attempt == 2
        (tmp_path / "go").touch()
        proxy.open = True
        await until(lambda: pool.counters.refused == 1)
        assert await store.finish(second, Outcome(output=8)) == "succeeded"
        with pytest.raises(LeaseLost):
            await store.finish(second, Outcome(output=9))
        (result,) = await store.results(["a"])
        assert (result.attempt, result.outcome.output) == (2, 8)
        assert (await store.counts())["refused_results"] == 2
        assert (tmp_path / "began").read_text() == "x"
