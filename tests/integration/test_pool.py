"""A pool whose processes die, whose agents hang, and whose store is slow or takes attempts away."""

import asyncio
import gc
import os
import sys
import textwrap
import warnings
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.runner.process import WorkerProcess
from fulmen.schema.errors import DataError, LeaseLost
from fulmen.schema.records import Lease, Outcome, Retry, Rollout, RolloutResult, Task
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore

ONCE = Retry(attempts=1)
TWICE = Retry(attempts=2)
WAIT_S = 60.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    opened = open_store(tmp_path / "run.db")
    yield opened
    await opened.close()


def rollout(name: str, *, retry: Retry = ONCE, deadline_s: float = WAIT_S, **given: Any) -> Rollout:
    task = Task(id=name, input={"name": name, **given})
    return Rollout(id=name, task=task, group="g", step=1, deadline_s=deadline_s, retry=retry)


def agent(folder: Path, source: str) -> str:
    """A function agent whose marks can be waited for."""
    head = f"""
        import asyncio, os, signal, sys, threading, time
        from pathlib import Path
        folder = Path({str(folder)!r})
        def mark(name):
            (folder / name).write_text(str(os.getpid()))
    """
    path = folder / "my_agent.py"
    path.write_text(textwrap.dedent(head) + textwrap.dedent(source))
    return f"{path}:solve"


async def there(path: Path) -> None:
    """Wait until a process has made a file; the one place where a test looks again and again."""
    async with asyncio.timeout(WAIT_S):
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0.01)


async def ends(store: SqlStore, names: Sequence[str]) -> list[RolloutResult]:
    left = set(names)
    async with asyncio.timeout(WAIT_S):
        while left:
            left -= set(await store.wait_finished(sorted(left)))
    return await store.results(names)


def pool(store: SqlStore, target: str, **options: Any) -> Pool:
    values: dict[str, Any] = {"workers": 4, "processes": 1, **options}
    return Pool(store, parse_agent(target), base_url="http://127.0.0.1:9", **values)


def failures(results: Sequence[RolloutResult]) -> list[str | None]:
    return [result.outcome.failure for result in results]


# --- what is never a success

ENDS = {
    "exit-0": "raise SystemExit(0)",
    "sys-exit": "sys.exit()",
    "interrupt": "raise KeyboardInterrupt",
    "cancelled": "raise asyncio.CancelledError",
    "generator-exit": "raise GeneratorExit",
}
ASYNC_ENDS = {
    "cancels-itself": "asyncio.current_task().cancel(); await asyncio.sleep(0)",
    "exit-in-a-task": "await asyncio.create_task(leave())",
    "exit-in-a-group": "async with asyncio.TaskGroup() as g: g.create_task(leave())",
}


@pytest.mark.parametrize(
    "body",
    [
        *(
            pytest.param(f"def solve(task):\n    {end}", id=f"sync-{name}")
            for name, end in ENDS.items()
        ),
        *(
            pytest.param(f"async def solve(task):\n    {end}", id=f"async-{name}")
            for name, end in (ENDS | ASYNC_ENDS).items()
        ),
    ],
)
async def test_an_agent_that_ends_itself_has_failed_and_others_go_on(store, tmp_path, body):
    source = f"""
async def leave():
    raise SystemExit(0)
{body}
"""
    path = tmp_path / "my_agent.py"
    path.write_text(f"import asyncio, sys\n{source}\n    return 'fine'\n")
    await store.enqueue([rollout("a"), rollout("b")])
    async with pool(store, f"{path}:solve") as working:
        results = await ends(store, ["a", "b"])
        assert working.counters.deaths == 0
    assert failures(results) == ["agent", "agent"]
    assert [result.outcome.output for result in results] == [None, None]


@pytest.mark.parametrize(
    ("body", "failure", "error"),
    [
        ("os._exit(0)", "infrastructure", "the worker process ended (exit status 0)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "infrastructure", "ended (signal SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "infrastructure", "ended (signal SIGTERM)"),
    ],
    ids=["exit", "kill", "term"],
)
async def test_a_process_that_ends_under_an_agent_is_no_success(
    store, tmp_path, body, failure, error
):
    await store.enqueue([rollout("a")])
    async with pool(store, agent(tmp_path, f"def solve(task):\n    {body}\n    return 1")):
        (result,) = await ends(store, ["a"])
    assert result.outcome.failure == failure
    assert error in result.outcome.error


@pytest.mark.parametrize(
    ("command", "failure"),
    [
        ("echo 42; kill -9 $$", "infrastructure"),
        ("echo 42; kill -TERM $$", "infrastructure"),
        ("echo 42; sh -c 'kill -9 $$'", "infrastructure"),
        ("echo 42; kill -SEGV $$", "agent"),
        ("echo 42; exit 1", "agent"),
        (f"{sys.executable} -c 'print(42); raise KeyboardInterrupt' 2>&1", "infrastructure"),
    ],
)
async def test_a_command_that_is_killed_is_no_success_whatever_it_has_printed(
    store, command, failure
):
    await store.enqueue([rollout("a")])
    async with pool(store, command):
        (result,) = await ends(store, ["a"])
    assert result.outcome.failure == failure


# --- attempts that the store ends


@pytest.mark.parametrize(
    "body",
    [
        "async def solve(task):\n    mark(task['name'])\n    await asyncio.sleep(1000)",
        "def solve(task):\n    mark(task['name'])\n    time.sleep(1000)",
        "async def solve(task):\n    mark(task['name'])\n    time.sleep(1000)",
    ],
    ids=["async", "thread", "blocking-the-loop"],
)
async def test_a_cancelled_rollout_s_agent_is_stopped_at_once(store, tmp_path, body):
    await store.enqueue([rollout("a")])
    async with pool(store, agent(tmp_path, body), workers=1, lease_s=WAIT_S) as working:
        await there(tmp_path / "a")
        process = psutil.Process(int((tmp_path / "a").read_text()))
        assert await store.cancel(["a"]) == 1
        async with working._idle:
            async with asyncio.timeout(WAIT_S / 2):
                await working._idle.wait_for(lambda: working.counters.running == 0)
        if "sleep(1000)" in body and "await" not in body:  # it could not be stopped otherwise
            await asyncio.to_thread(process.wait, WAIT_S)
        assert working.counters.failures == {"cancelled": 1}
    assert failures(await store.results(["a"])) == ["cancelled"]
    assert (await store.counts())["refused_results"] == 0


async def test_a_cancelled_command_is_ended_with_all_that_it_started(store, tmp_path):
    pids = tmp_path / "pids"
    command = f"sleep 1000 & echo $$ $! > {pids}; wait"
    await store.enqueue([rollout("a")])
    async with pool(store, command, lease_s=WAIT_S) as working:
        await there(pids)
        started = [psutil.Process(pid) for pid in map(int, pids.read_text().split())]
        await store.cancel(["a"])
        async with working._idle, asyncio.timeout(WAIT_S / 2):
            await working._idle.wait_for(lambda: working.counters.running == 0)
        _, alive = await asyncio.to_thread(psutil.wait_procs, started, WAIT_S / 2)
        assert all(process.status() == "zombie" for process in alive)  # nobody took its end


async def test_an_attempt_that_ends_before_it_has_begun_is_never_begun(
    store, tmp_path, monkeypatch
):
    source = "async def solve(task):\n    mark(task['name'])\n    return 1"
    claim = store.claim

    async def cancelled(*given: Any, **options: Any) -> list[Lease]:
        leases = await claim(*given, **options)
        await store.cancel([lease.rollout.id for lease in leases if lease.rollout.id == "a"])
        return leases

    monkeypatch.setattr(store, "claim", cancelled)
    await store.enqueue([rollout("a"), rollout("b")])
    async with pool(store, agent(tmp_path, source)) as working:
        results = await ends(store, ["a", "b"])
        assert failures(results) == ["cancelled", None]
        async with working._idle, asyncio.timeout(WAIT_S):
            await working._idle.wait_for(lambda: working.counters.running == 0)
    assert not (tmp_path / "a").exists()


async def test_an_attempt_that_is_stopped_as_soon_as_it_is_started_ends(store, tmp_path):
    """A task that is cancelled before its first step never runs, so it can report nothing."""
    source = "async def solve(task):\n    await asyncio.sleep(1000)"
    await store.enqueue([rollout(str(n), deadline_s=1e-6) for n in range(20)])
    async with pool(store, agent(tmp_path, source), workers=20) as working:
        results = await ends(store, [str(n) for n in range(20)])
        assert working.counters.deaths == 0
    assert failures(results) == ["timeout"] * 20


async def test_a_worker_that_is_fenced_stops_its_agent_without_waiting_for_a_heartbeat(
    store, tmp_path
):
    source = """
        async def solve(task):
            if (folder / "first").exists():
                return "second"
            mark("first")
            await asyncio.sleep(1000)
    """
    await store.enqueue([rollout("a", retry=TWICE)])
    async with pool(store, agent(tmp_path, source), lease_s=1000) as working:
        await there(tmp_path / "first")
        assert await store.expire_leases(now=1e12) == ["a"]
        (result,) = await ends(store, ["a"])
    assert (result.outcome.output, result.attempt) == ("second", 2)
    assert working.counters.refused == 1


# --- threads and processes that hang


async def test_a_thread_that_does_not_stop_costs_its_process_but_not_what_runs_beside_it(
    store, tmp_path
):
    source = """
        def solve(task):
            mark(task["name"])
            if task["name"] == "hangs":
                while True:
                    time.sleep(0.01)
            while not (folder / "go").exists():
                time.sleep(0.01)
            return os.getpid()
    """
    await store.enqueue([rollout("hangs", deadline_s=0.2), rollout("beside")])
    async with pool(store, agent(tmp_path, source), workers=2) as working:
        assert failures(await ends(store, ["hangs"])) == ["timeout"]
        await there(tmp_path / "beside")
        (process,) = working._processes
        while not process.retired:
            await asyncio.sleep(0.01)
        await store.enqueue([rollout("later")])
        await there(tmp_path / "later")
        (tmp_path / "go").touch()
        beside, later = await ends(store, ["beside", "later"])
        assert failures([beside, later]) == [None, None]
        assert beside.outcome.output != later.outcome.output
        await process._process.wait()


async def test_a_thread_that_stops_in_time_costs_nothing(store, tmp_path):
    source = """
        def solve(task):
            mark(task["name"])
            while not (folder / "go").exists():
                time.sleep(0.01)
            return os.getpid()
    """
    await store.enqueue([rollout("a", deadline_s=0.2)])
    async with pool(store, agent(tmp_path, source), workers=1) as working:
        assert failures(await ends(store, ["a"])) == ["timeout"]
        (tmp_path / "go").touch()
        (process,) = working._processes
        while process._stuck:
            await asyncio.sleep(0.01)
        await store.enqueue([rollout("b")])
        (result,) = await ends(store, ["b"])
        assert result.outcome.output == process._process.pid


async def test_a_process_that_hangs_is_killed_and_what_ran_beside_is_tried_again(store, tmp_path):
    source = """
        async def solve(task):
            if task["name"] == "hangs":
                while not (folder / "beside").exists():
                    await asyncio.sleep(0.01)
                time.sleep(1000)
            if (folder / "beside").exists():
                return "second"
            mark("beside")
            await asyncio.sleep(1000)
    """
    await store.enqueue([rollout("hangs", deadline_s=1.0), rollout("beside", retry=TWICE)])
    async with pool(store, agent(tmp_path, source), workers=2):
        hangs, beside = await ends(store, ["hangs", "beside"])
    assert hangs.outcome.failure == "timeout"
    assert (beside.outcome.output, beside.attempt) == ("second", 2)


async def test_leases_given_to_a_process_that_is_dying_are_tried_again_and_no_place_is_lost(
    store, tmp_path, monkeypatch
):
    run = WorkerProcess.run
    killed: list[int] = []

    def dying(self: WorkerProcess, lease: Lease) -> int:
        if not killed:
            killed.append(self._process.pid)
            os.kill(self._process.pid, 9)
        return run(self, lease)

    monkeypatch.setattr(WorkerProcess, "run", dying)
    names = [str(n) for n in range(12)]
    await store.enqueue([rollout(name, retry=TWICE) for name in names])
    source = "async def solve(task):\n    return task['name']"
    async with pool(store, agent(tmp_path, source), workers=3) as working:
        results = await ends(store, names)
        async with working._idle, asyncio.timeout(WAIT_S):
            await working._idle.wait_for(lambda: working.counters.running == 0)
        assert working._free() == 3
    assert [result.outcome.output for result in results] == names
    assert {result.attempt for result in results} == {1, 2}


# --- a store that is slow


class Slow:
    """Holds results back until they are let through."""

    def __init__(self, store: SqlStore) -> None:
        self._finish, self.told = store.finish, asyncio.Event()
        self.through = asyncio.Event()

    async def finish(self, lease: Lease, outcome: Outcome) -> str:
        self.told.set()
        await self.through.wait()
        return await self._finish(lease, outcome)


async def test_a_lease_is_kept_until_its_result_has_reached_the_store(store, tmp_path, monkeypatch):
    slow = Slow(store)
    monkeypatch.setattr(store, "finish", slow.finish)
    await store.enqueue([rollout("a")])
    source = "async def solve(task):\n    return 1"
    async with pool(store, agent(tmp_path, source), lease_s=0.3) as working:
        await slow.told.wait()
        heartbeat, seen = store.heartbeat, []

        async def heard(leases: Sequence[Lease], **options: Any) -> list[Lease]:
            seen.append(len(leases))
            if len(seen) == 5:
                slow.through.set()
            return await heartbeat(leases, **options)

        monkeypatch.setattr(store, "heartbeat", heard)
        (result,) = await ends(store, ["a"])
        assert working.counters.refused == 0
    assert (result.outcome.output, result.attempt) == (1, 1)
    assert seen[:5] == [1] * 5


async def test_a_result_that_is_there_when_the_pool_is_closed_is_told(store, tmp_path, monkeypatch):
    slow = Slow(store)
    monkeypatch.setattr(store, "finish", slow.finish)
    await store.enqueue([rollout("a")])
    async with pool(store, agent(tmp_path, "async def solve(task):\n    return 1")):
        await slow.told.wait()
        asyncio.get_running_loop().call_later(0.1, slow.through.set)
    (result,) = await store.results(["a"])
    assert result.outcome.output == 1


async def test_what_runs_when_the_pool_is_closed_is_queued_again_at_once(store, tmp_path):
    source = "async def solve(task):\n    mark(task['name'])\n    await asyncio.sleep(1000)"
    await store.enqueue([rollout("a", retry=TWICE), rollout("b")])
    async with pool(store, agent(tmp_path, source), workers=2):
        await there(tmp_path / "a")
        await there(tmp_path / "b")
    (again,) = await store.claim("w")
    assert (again.rollout.id, again.attempt) == ("a", 2)
    (b,) = await store.results(["b"])
    assert (b.outcome.failure, b.outcome.error) == ("infrastructure", "its worker was closed")


async def test_a_pool_that_is_left_before_any_of_its_parts_has_begun_leaves_nothing_behind(
    store, tmp_path
):
    """A coroutine that is never awaited warns when it is collected, and warnings are errors."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        async with pool(store, agent(tmp_path, "def solve(task):\n    return 1")):
            pass
        gc.collect()
    assert [str(one.message) for one in told] == []


async def test_a_store_that_does_not_answer_holds_the_close_up_for_a_bounded_time(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr("fulmen.runner.pool._TELL_S", 0.1)
    slow = Slow(store)
    monkeypatch.setattr(store, "finish", slow.finish)
    await store.enqueue([rollout("a")])
    async with asyncio.timeout(WAIT_S):
        async with pool(store, agent(tmp_path, "async def solve(task):\n    return 1")):
            await slow.told.wait()
    assert (await store.counts())["running"] == 1


async def test_a_result_that_the_store_refuses_is_counted_and_the_pool_goes_on(
    store, tmp_path, monkeypatch
):
    finish, refused = store.finish, []

    async def refusing(lease: Lease, outcome: Outcome) -> str:
        if not refused:
            refused.append(lease)
            raise LeaseLost("attempt 2 has begun")
        return await finish(lease, outcome)

    monkeypatch.setattr(store, "finish", refusing)
    await store.enqueue([rollout("a"), rollout("b")])
    source = "async def solve(task):\n    return 1"
    async with pool(store, agent(tmp_path, source), workers=1) as working:
        (result,) = await ends(store, ["b"])
        assert working.counters.refused == 1
    assert result.outcome.output == 1


async def test_an_outcome_that_the_store_cannot_take_is_the_agents_failure(
    store, tmp_path, monkeypatch
):
    finish = store.finish

    async def narrow(lease: Lease, outcome: Outcome) -> str:
        if outcome.output == "large":
            raise DataError("a request of more than 64 MiB")
        return await finish(lease, outcome)

    monkeypatch.setattr(store, "finish", narrow)
    await store.enqueue([rollout("a")])
    async with pool(store, agent(tmp_path, "def solve(task):\n    return 'large'"), workers=1):
        (result,) = await ends(store, ["a"])
    assert result.outcome.failure == "agent"
    assert result.outcome.error.endswith("cannot be kept: a request of more than 64 MiB")
