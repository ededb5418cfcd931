"""What agents do to the process they run in, and what must be left standing, or not, afterwards."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Outcome, Rollout, Task
from fulmen.store.open import open_store
from fulmen.store.sqlite import SqliteStore

NOWHERE = "http://127.0.0.1:9"
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def write_agent(folder: Path, source: str, name: str = "my_agent.py") -> str:
    """Write a file with an agent; returns its `file:function`."""
    prelude = "import asyncio, os, signal, subprocess, sys, threading, time\n"
    (folder / name).write_text(prelude + textwrap.dedent(source))
    return f"{folder / name}:solve"


def rollout(number: int, **changes: Any) -> Rollout:
    fields: dict[str, Any] = {"deadline_s": 30.0, "max_attempts": 1, **changes}
    task = Task(id=str(number), input={"n": number})
    return Rollout(id=f"r{number}", task=task, group="g", step=1, **fields)


@pytest.fixture
async def store(tmp_path) -> AsyncIterator[SqliteStore]:
    opened = open_store(tmp_path / "run.db")
    yield opened
    await opened.close()


async def all_of(store: SqliteStore, pool: Pool, rollouts: list[Rollout]) -> list[Outcome]:
    """Their outcomes, when all have ended; raises what breaks the pool meanwhile."""
    names = [r.id for r in rollouts]
    await store.enqueue(rollouts)

    async def ended() -> None:
        while pending := set(names) - set(await store.wait_finished(names, timeout_s=0)):
            await store.wait_finished(sorted(pending))

    await first_of(ended, pool.broken)
    return [result.outcome for result in await store.results(names)]


async def first_of(*waits: Callable[[], Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(wait()) for wait in waits]
    try:
        async with asyncio.timeout(60):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


def pool_of(store: SqliteStore, agent: str, **options: Any) -> Pool:
    options = {"workers": 1, "processes": 1, **options}
    return Pool(store, parse_agent(agent), base_url=NOWHERE, **options)


async def gone(pid: int) -> bool:
    """Whether the process ends, being given time that a loaded machine may need."""
    try:
        process = psutil.Process(pid)
        if process.status() not in DEAD:
            await asyncio.to_thread(process.wait, 15)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return process.status() in DEAD
    return True


async def test_a_thread_past_its_deadline_does_not_hold_its_place(tmp_path, store):
    agent = write_agent(
        tmp_path,
        """
        def solve(task):
            print("begun")
            if task["n"] == 0:
                threading.Event().wait()
            return "done"
        """,
    )
    async with pool_of(store, agent) as pool:
        first, second = await all_of(store, pool, [rollout(0, deadline_s=0.5), rollout(1)])
        assert pool.counters.deaths == 0, "it was ended on purpose"
    assert (first.failure, first.log) == ("timeout", "begun\n")
    assert second.output == "done"


async def test_deadlines_alone_never_look_like_an_agent_that_kills_its_process(tmp_path, store):
    agent = write_agent(tmp_path, "def solve(task):\n    threading.Event().wait()")
    async with pool_of(store, agent) as pool:
        outcomes = await all_of(store, pool, [rollout(n, deadline_s=0.2) for n in range(6)])
    assert {outcome.failure for outcome in outcomes} == {"timeout"}


async def test_a_process_is_never_given_more_than_it_has_room_for(tmp_path, store):
    """Else two attempts would share the key that one of them finds in the environment."""
    agent = write_agent(
        tmp_path,
        """
        busy = []
        async def solve(task):
            if task["n"] == 0:
                os._exit(3)
            busy.append(task["n"])
            most = len(busy)
            await asyncio.sleep(0.2)
            busy.remove(task["n"])
            return most
        """,
    )
    async with pool_of(store, agent, workers=2, processes=2) as pool:
        outcomes = await all_of(store, pool, [rollout(n) for n in range(6)])
    assert [outcome.output for outcome in outcomes[1:]] == [1] * 5


async def test_leaving_the_process_in_a_task_of_its_own_is_the_agent_s_failure(tmp_path, store):
    agent = write_agent(
        tmp_path,
        """
        async def leave():
            sys.exit("enough")
        async def solve(task):
            if task["n"] == 0:
                await asyncio.gather(leave(), asyncio.sleep(0))
            return os.getpid()
        """,
    )
    async with pool_of(store, agent) as pool:
        worker = (await all_of(store, pool, [rollout(1)]))[0].output
        left, after = await all_of(store, pool, [rollout(0), rollout(2)])
    assert (left.failure, left.error) == ("agent", "SystemExit: enough (my_agent.py:3)")
    assert after.output == worker, "the worker was not replaced"


@pytest.mark.parametrize(
    "body",
    ["print('\\ud800'); return 1", "raise ValueError('\\ud800')", "return '\\ud800'"],
    ids=["printed", "raised", "returned"],
)
async def test_text_that_is_no_unicode_ends_the_attempt_like_any_other(tmp_path, store, body):
    agent = write_agent(tmp_path, f"def solve(task):\n    {body}")
    async with pool_of(store, agent) as pool:
        (outcome,) = await all_of(store, pool, [rollout(1, deadline_s=10)])
    assert outcome.failure in (None, "agent")
    assert "ud800" in outcome.log


async def test_a_function_that_hands_back_a_coroutine_is_awaited(tmp_path, store):
    agent = write_agent(
        tmp_path,
        """
        async def think(task):
            await asyncio.sleep(0)
            return task["n"]
        def solve(task):
            return think(task)
        """,
    )
    async with pool_of(store, agent) as pool:
        (outcome,) = await all_of(store, pool, [rollout(7)])
    assert outcome.output == 7


async def test_the_environment_does_not_grow_with_the_attempts(tmp_path, store):
    agent = write_agent(tmp_path, "def solve(task):\n    return os.environ['NO_PROXY']")
    async with pool_of(store, agent) as pool:
        outcomes = await all_of(store, pool, [rollout(n) for n in range(3)])
    assert len({outcome.output for outcome in outcomes}) == 1


async def test_a_command_s_answer_does_not_wait_for_what_it_left_in_the_background(store):
    async with pool_of(store, "sleep 1000 & echo $!") as pool:
        (outcome,) = await all_of(store, pool, [rollout(1, deadline_s=10)])
    assert outcome.failure is None
    assert await gone(int(outcome.output))


async def test_a_command_that_never_stops_talking_is_stopped(store):
    async with pool_of(store, "yes") as pool:
        (outcome,) = await all_of(store, pool, [rollout(1, deadline_s=60)])
    assert outcome.failure == "agent"
    assert "more than" in outcome.error


async def test_a_command_that_does_not_read_its_task_is_no_failure(store):
    big = Task(id="big", input="x" * 1_000_000)
    async with pool_of(store, "echo fine") as pool:
        (outcome,) = await all_of(
            store, pool, [Rollout(id="big", task=big, group="g", step=1, deadline_s=20)]
        )
    assert (outcome.failure, outcome.output) == (None, "fine")


async def test_a_command_knows_which_attempt_it_is(store):
    async with pool_of(store, 'echo "$FULMEN_ROLLOUT_ID/$FULMEN_ATTEMPT"') as pool:
        (outcome,) = await all_of(store, pool, [rollout(4)])
    assert outcome.output == "r4/1"


async def test_a_killed_worker_takes_its_commands_and_their_children_with_it(tmp_path, store):
    """Of the pipeline only the shell is the worker's child; the rest must be found."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = f"{{ sleep 1000; true; }} | {{ sh -c 'echo $PPID > {pipe}; sleep 1000; true'; }}"
    async with pool_of(store, command) as pool:
        await store.enqueue([rollout(1)])
        inner = psutil.Process(int(await asyncio.to_thread(pipe.read_text)))
        (worker,) = psutil.Process().children()
        members = worker.children(recursive=True)
        assert inner in members
        worker.kill()
        for member in members:
            assert await gone(member.pid), member
        assert pool.counters.deaths <= 1


async def test_closing_the_pool_ends_what_agents_have_started(tmp_path, store):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    agent = write_agent(
        tmp_path,
        f"""
        def solve(task):
            child = subprocess.Popen(["sleep", "1000"], process_group=0)
            with open({str(pipe)!r}, "w") as file:
                file.write(str(child.pid))
            child.wait()
        """,
    )
    async with pool_of(store, agent):
        await store.enqueue([rollout(1, max_attempts=2)])
        child = int(await asyncio.to_thread(pipe.read_text))
    assert await gone(child)
    assert (await store.counts())["queued"] == 1, "another pool may begin at once"


_PARENT = """
import asyncio, sys
from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.records import Rollout, Task
from fulmen.store.open import open_store
async def main():
    store = open_store(sys.argv[1])
    await store.enqueue([Rollout(id="r", task=Task(id="t", input=1), group="g", step=1)])
    async with Pool(store, parse_agent(sys.argv[2]), base_url="http://127.0.0.1:9", workers=1):
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_killed_parent_leaves_nothing_behind_even_of_a_blocked_loop(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    agent = write_agent(
        tmp_path,
        f"""
        async def solve(task):
            child = subprocess.Popen(["sleep", "1000"])
            with open({str(pipe)!r}, "w") as file:
                file.write(f"{{os.getpid()}} {{child.pid}}")
            threading.Event().wait()
        """,
    )
    arguments = [sys.executable, "-c", _PARENT, str(tmp_path / "run.db"), agent]
    parent = subprocess.Popen(arguments)
    pids = [int(pid) for pid in (await asyncio.to_thread(pipe.read_text)).split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    left = [pid for pid in pids if not await gone(pid)]
    for pid in left:  # of a failing test, too, nothing may be left
        os.kill(pid, signal.SIGKILL)
    assert left == []


class Breaking:
    """A store whose disk is full when a result is to be written."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def finish(self, *_: object) -> None:
        raise OSError(28, "No space left on device")


async def test_a_store_that_fails_breaks_the_pool_instead_of_stopping_it_silently(tmp_path, store):
    agent = write_agent(tmp_path, "def solve(task): return 1")
    async with pool_of(Breaking(store), agent) as pool:  # type: ignore[arg-type] - a stand-in
        await store.enqueue([rollout(1)])
        with pytest.raises(OSError, match="No space left"):
            await first_of(pool.broken)


async def test_the_last_error_is_there_for_the_display(tmp_path, store):
    agent = write_agent(tmp_path, "def solve(task):\n    return 1 / task['n']")
    async with pool_of(store, agent) as pool:
        await all_of(store, pool, [rollout(n) for n in range(2)])
        counters = pool.counters
    assert (counters.running, counters.finished, counters.failures) == (0, 2, {"agent": 1})
    assert counters.last_error == "ZeroDivisionError: division by zero (my_agent.py:3)"


async def test_a_worker_that_dies_at_import_says_its_last_words(tmp_path, store):
    agent = write_agent(
        tmp_path, "os.write(2, b'libfoo: no device\\n'); os._exit(4)\ndef solve(t): 0"
    )
    with pytest.raises(AgentError, match=r"exit status 4.*libfoo: no device"):
        async with pool_of(store, agent):
            pass
