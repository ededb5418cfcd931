"""The process of the model: its errors are ours, and neither process outlives the other."""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from fulmen.engine.base import GenerateRequest
from fulmen.launch.host import Host, HostProcess, hosted
from fulmen.launch.host_orders import Do
from fulmen.schema.errors import DataError, EngineError, GrammarError, ModelError
from hosts import fail_oddly, plan_of, refuse, speak, write_to

_PATIENCE_S = 60.0
LOADING = """
import sys, threading
from dataclasses import replace
sys.path[:0] = {path!r}
from hosts import plan_of
from fulmen.launch.host import HostProcess

process = HostProcess(replace(plan_of(), path=[{folder!r}, *sys.path]))
threading.Thread(target=process.ready).start()
with open({folder!r} + "/loading") as told:
    told.read(1)
print("ready", flush=True)
"""
NEVER_LOADED = """
import threading
with open({folder!r} + "/loading", "w") as tell:
    tell.write("!")
threading.Event().wait()
"""
WAITING = """
import asyncio, sys
sys.path[:0] = {path!r}
from hosts import plan_of
from fulmen.launch.host import hosted

async def main():
    async with hosted(plan_of()):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def ask(count: int, **options) -> GenerateRequest:
    return GenerateRequest(id="r", prompt_ids=(1, 2, 3), max_tokens=count, **options)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[tuple[Host, psutil.Process]]:
    before = children()
    async with hosted(plan_of()) as host:
        (process,) = children() - before
        yield host, process
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def process():
    process = HostProcess(plan_of())
    process.ready()
    yield process
    process.close()


async def test_a_model_that_is_not_there_is_the_error_of_loading_it():
    before = children()
    with pytest.raises(ModelError, match="no such folder"):
        async with hosted(plan_of("./nowhere")):
            pass
    assert children() == before


async def test_tokens_come_from_the_other_process_and_it_ends_with_us():
    async with running() as (host, _):
        engine = host.policies[0].engine
        request = ask(8, seed=2**70 + 1, stream=False)
        (one,) = [delta async for delta in engine.generate(request)]
        (same,) = [delta async for delta in engine.generate(ask(8, seed=1, stream=False))]
        assert one == same, "seeds are taken modulo 2**64"
        assert one.token_ids


async def test_a_form_is_checked_here_and_kept_there():
    grammar = 'start: "7" "7"'
    async with running() as (host, _):
        policy = host.policies[0]
        policy.engine.check_grammar(grammar)
        with pytest.raises(GrammarError):
            policy.engine.check_grammar("start: nothing")
        request = ask(8, grammar=grammar, stop_ids=policy.renderer.stop_ids)
        ids = [i async for delta in policy.engine.generate(request) for i in delta.token_ids]
        assert policy.renderer.decode(ids[:-1]) == "77"


async def test_completions_under_way_end_with_an_error_if_the_process_is_killed():
    async with running() as (host, process):
        engine = host.policies[0].engine
        stream = engine.generate(ask(400))
        await anext(stream)
        process.kill()
        with pytest.raises(EngineError, match=r"SIGKILL.*run out of memory"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="SIGKILL"):
            await anext(engine.generate(ask(1)))


async def test_an_order_under_way_ends_with_an_error_if_the_process_is_killed(tmp_path):
    before = children()
    process = HostProcess(plan_of())
    process.ready()
    (child,) = children() - before
    begun = tmp_path / "begun"
    order = asyncio.create_task(asyncio.to_thread(process.do, Do(write_to, (begun,))))
    while not begun.exists() and not order.done():
        await asyncio.sleep(0.01)
    child.kill()
    with pytest.raises(EngineError, match="SIGKILL"):
        await order
    with pytest.raises(EngineError, match="SIGKILL"):
        process.do(Do(speak, ()))
    process.close()


async def test_closing_does_not_wait_for_an_order_under_way(process, tmp_path):
    begun = tmp_path / "begun"
    order = asyncio.create_task(asyncio.to_thread(process.do, Do(write_to, (begun,))))
    while not begun.exists() and not order.done():
        await asyncio.sleep(0.01)
    process.close()
    with pytest.raises(EngineError):
        await order


def test_an_error_of_an_order_is_raised_here_with_where_it_happened(process):
    with pytest.raises(DataError, match="line 3; do this") as raised:
        process.do(Do(refuse, ("line 3",)))
    assert "in refuse" in "".join(raised.value.__notes__)
    with pytest.raises(RuntimeError, match="Unpicklable: oddly"):
        process.do(Do(fail_oddly, ()))
    assert process.do(Do(speak, ())).value != os.getpid(), "it goes on after errors"


def test_nothing_that_it_prints_is_in_our_output(process, capfd):
    process.do(Do(speak, ()))
    process.close()
    assert "for nobody" not in capfd.readouterr().out


async def test_work_is_cancelled_and_says_why_if_the_process_ends():
    cancelled = asyncio.Event()

    async def work(process: psutil.Process) -> None:
        process.kill()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with running() as (host, process):
        with pytest.raises(EngineError, match="SIGKILL"):
            await host.while_there(work(process))
        assert cancelled.is_set()


async def test_work_that_ends_first_is_as_if_nobody_watched():
    async def answer() -> int:
        return 42

    async def refuse() -> None:
        raise DataError("no")

    async with running() as (host, _):
        assert await host.while_there(answer()) == 42
        with pytest.raises(DataError, match="no"):
            await host.while_there(refuse())


def test_a_module_in_the_current_folder_is_no_part_of_it(tmp_path, monkeypatch):
    (tmp_path / "statistics.py").write_text("raise RuntimeError('a module of the user')")
    path = [folder for folder in sys.path if folder not in ("", os.getcwd())]
    monkeypatch.chdir(tmp_path)
    process = HostProcess(dataclasses.replace(plan_of(), path=path))
    assert process.ready().parameters > 0
    process.close()


@pytest.mark.parametrize("parent", [WAITING, LOADING], ids=["serving", "loading"])
def test_it_ends_when_we_are_killed(parent, tmp_path):
    os.mkfifo(tmp_path / "loading")
    (tmp_path / "torch.py").write_text(NEVER_LOADED.format(folder=str(tmp_path)))
    script = parent.format(path=sys.path, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        family = psutil.Process(run.pid).children(recursive=True)
        assert len(family) == 1
        run.kill()
    _, alive = psutil.wait_procs(family, timeout=_PATIENCE_S)
    assert not alive
