"""The store over HTTP: who may do what, what is lost on the way, and workers elsewhere."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from databases import Proxy, free_port
from fulmen.launch.elsewhere import Elsewhere, expiring
from fulmen.runner.store_client import StoreClient
from fulmen.schema.errors import ConfigError, DataError, LeaseLost, RunOver, StoreError
from fulmen.schema.packing import pack
from fulmen.schema.records import Lease, Outcome, Reward, Rollout, Span, StepRecord, Task
from fulmen.schema.role_keys import make_role_keys
from fulmen.server.ends import EndsList
from fulmen.server.http import Listening
from fulmen.server.store_api import LINGER_S, MOST_BYTES, StoreApi
from fulmen.store import verbs
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore
from fulmen.trainer.events import Note
from stores import heard

DONE = Outcome(output="42")
WAIT_S = 30.0
"""Longer than any of these tests takes."""


def rollout(name: str, **changes: Any) -> Rollout:
    return Rollout(id=name, task=Task(id="t", input={"n": 1}), group="g", step=1, **changes)


@asynccontextmanager
async def listening(store: SqlStore, port: int = 0) -> AsyncIterator[Listening]:
    api = StoreApi(store, make_role_keys(store.secret))
    app = Starlette(routes=api.routes())
    async with Listening(app, "127.0.0.1", port) as server, aclosing(api):
        yield server


@asynccontextmanager
async def listening_to_the_end(store: SqlStore) -> AsyncIterator[Listening]:
    """A server whose run is over when the context is left."""
    api = StoreApi(store, make_role_keys(store.secret))
    async with (
        Listening(Starlette(routes=api.routes()), "127.0.0.1", 0) as server,
        aclosing(api),
    ):
        yield server
        api.run_is_over()


@asynccontextmanager
async def client_of(
    store: SqlStore, port: int, role: str = "worker", patience_s: float = WAIT_S
) -> AsyncIterator[StoreClient]:
    key = getattr(make_role_keys(store.secret), role)
    client = StoreClient(f"http://127.0.0.1:{port}", key, patience_s=patience_s)
    yield client
    await client.close()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    opened = open_store(tmp_path / "run.db")
    yield opened
    await opened.close()


@pytest.fixture
async def server(store: SqlStore) -> AsyncIterator[Listening]:
    async with listening(store) as server:
        yield server


@pytest.fixture
async def worker(store: SqlStore, server: Listening) -> AsyncIterator[StoreClient]:
    async with client_of(store, server.port) as client:
        yield client


async def post(url: str, verb: str, body: bytes, key: str = "", name: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if name:
        headers["x-fulmen-request"] = name
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{url}/v1/store/{verb}", content=body, headers=headers)


# --- who may do what


async def test_a_worker_claims_reports_and_gives_its_own_rewards(store, worker):
    await store.enqueue([rollout("a")])
    (lease,) = await worker.claim("w", wait_s=WAIT_S)
    assert await worker.heartbeat([lease]) == []
    await worker.record_spans([Span(id="s", rollout_id="a", attempt=1, name="tool")])
    await worker.add_rewards([Reward(rollout_id="a", attempt=1, value=1.0, source="agent")])
    assert await worker.finish(lease, DONE) == "succeeded"
    (result,) = await store.results(["a"])
    assert ([s.id for s in result.spans], [r.value for r in result.rewards]) == (["s"], [1.0])


async def test_a_worker_may_do_nothing_else(store, worker):
    await store.enqueue([rollout("a")])
    (lease,) = await worker.claim("w")
    step = StepRecord(step=1, version=1, consumed=(), metrics={})
    asked = {
        "enqueue": lambda: worker.enqueue([rollout("b")]),
        "results": lambda: worker.results(["a"]),
        "cancel": lambda: worker.cancel(["a"]),
        "commit_step": lambda: worker.commit_step(step),
        "steps": worker.steps,
        "counts": worker.counts,
        "discard_after": lambda: worker.discard_after(0),
        "expire_leases": lambda: worker.expire_leases(now=1e12),
        "wait_finished": lambda: worker.wait_finished(["a"]),
    }
    for verb, ask in asked.items():
        with pytest.raises(StoreError, match=f"a worker's key does not allow {verb}; it needs the"):
            await ask()
    for source in ("grader", "rule", "failure"):
        reward = Reward(rollout_id="a", attempt=1, value=1.0, source=source)
        with pytest.raises(StoreError, match=f"does not allow rewards of a {source}"):
            await worker.add_rewards([reward])
    assert await worker.finish(lease, DONE) == "succeeded"
    assert (await store.results(["a"]))[0].rewards == ()


async def test_without_a_key_of_the_run_nothing_is_answered(store, server):
    await store.enqueue([rollout("a")])
    (lease,) = await store.claim("w")
    body = pack(verbs.Counts(), "counts")
    for key in ("", "guess", lease.key, make_role_keys(b"another run").admin):
        answer = await post(server.url, "counts", body, key)
        assert answer.status_code == 401
        assert "not one of this run's store" in answer.content.decode(errors="replace")
        if key:
            assert key not in answer.content.decode(errors="replace")
    stranger = StoreClient(server.url, "guess")
    with pytest.raises(
        ConfigError, match=r"not one of this run's store; give the key in worker\.key"
    ):
        await stranger.heartbeat([])
    await stranger.close()


async def test_what_is_no_question_is_refused_in_words(store, server):
    key = make_role_keys(store.secret).admin
    encode = msgspec.msgpack.encode
    for verb, body, status, words in (
        ("drop", b"", 404, "a store has no verb 'drop'"),
        ("counts", b"\xc1", 400, "not a question to a store"),
        ("counts", encode({"verb": "steps"}), 400, "a question to steps was sent to counts"),
        ("cancel", encode({"verb": "cancel", "rollout_ids": ["a"], "x": 1}), 400, "unknown field"),
        ("cancel", encode({"verb": "cancel", "rollout_ids": [1]}), 400, "Expected `str`"),
        ("batch", encode({"verb": "counts"}), 400, "not a batch of questions"),
        ("claim", encode({"verb": "claim", "workers": [], "lease_s": 1e9}), 400, "a lease of"),
    ):
        answer = await post(server.url, verb, body, key)
        assert (answer.status_code, words in answer.text) == (status, True), answer.text


async def test_a_batch_is_answered_in_order_and_one_refusal_spoils_nothing(store, server):
    await store.enqueue([rollout("a")])
    waiting = verbs.WaitFinished(rollout_ids=("a",), wait_s=5.0)
    asks = [verbs.Counts(), waiting, {"verb": "nonsense"}, verbs.Cancel(rollout_ids=("a",))]
    key = make_role_keys(store.secret).admin
    answer = await post(server.url, "batch", msgspec.msgpack.encode(asks), key)
    counts, waited, nonsense, cancelled = msgspec.msgpack.decode(answer.content)
    assert (counts[0], "queued" in counts[1]) == (True, True)
    assert (waited[0], waited[1]["message"]) == (
        False,
        "wait_finished waits, and may not be part of a batch",
    )
    assert (nonsense[0], nonsense[1]["kind"]) == (False, "DataError")
    assert cancelled == [True, 1]


async def test_a_request_that_is_too_large_is_refused_before_it_is_read(store, server):
    key = make_role_keys(store.secret).admin
    answer = await post(server.url, "counts", b"\0" * (MOST_BYTES + 1), key)
    assert (answer.status_code, "more than 64 MiB" in answer.text) == (413, True)
    async with client_of(store, server.port, "admin") as admin:
        with pytest.raises(DataError, match="more than 64 MiB; send it in parts"):
            await admin.finish((await _lease(store)), Outcome(output="x" * (MOST_BYTES + 1)))


async def _lease(store: SqlStore) -> Lease:
    await store.enqueue([rollout("large")])
    (lease,) = await store.claim("w")
    return lease


# --- what is lost on the way


async def test_answers_that_are_lost_are_given_again_and_nothing_is_done_twice(store, server):
    proxy = Proxy(server.port, answer=b"HTTP/1.1 200")
    async with client_of(store, proxy.port, "admin") as admin:
        proxy.hide_commits(1)
        assert await admin.enqueue([rollout("a"), rollout("b")]) == 2
        proxy.hide_commits(1)
        (first,) = await admin.claim("w", wait_s=WAIT_S)
        proxy.hide_commits(1)
        (second,) = await admin.claim("w")
        assert (first.rollout.id, first.attempt) == ("a", 1)
        assert (second.rollout.id, second.attempt) == ("b", 1)
        proxy.hide_commits(1)
        assert await admin.finish(first, DONE) == "succeeded"
        proxy.hide_commits(1)
        assert await admin.cancel(["a", "b"]) == 1
        assert proxy.hidden == 5
    assert (await store.counts())["refused_results"] == 0
    proxy.close()


async def test_leases_for_a_client_that_has_gone_return_to_the_queue(store, server):
    await store.enqueue([rollout("a", deadline_s=9)])
    (held,) = await store.claim("elsewhere")
    key = make_role_keys(store.secret).worker
    gone = StoreClient(server.url, key)
    claiming = asyncio.create_task(gone.claim("gone", wait_s=WAIT_S))
    await gone.heartbeat([])
    claiming.cancel()
    await asyncio.gather(claiming, return_exceptions=True)
    await gone.close()
    await store.finish(held, Outcome(failure="infrastructure"))
    (lease,) = await store.claim("w", wait_s=WAIT_S)
    assert (lease.worker, lease.attempt) == ("w", 2)


async def test_spans_come_before_the_end_of_their_attempt_however_many_there_are(store, worker):
    names = [f"r{i}" for i in range(50)]
    await store.enqueue([rollout(name) for name in names])

    async def agent() -> None:
        (lease,) = await worker.claim("w", wait_s=WAIT_S)
        of = {"rollout_id": lease.rollout.id, "attempt": lease.attempt, "name": "round"}
        for index in range(20):
            await worker.record_spans([Span(id=f"s{index}", started=float(index), **of)])
        assert await worker.finish(lease, DONE) == "succeeded"

    await asyncio.gather(*(agent() for _ in names))
    results = await store.results(names)
    assert [len(result.spans) for result in results] == [20] * 50
    assert (await store.counts())["refused_spans"] == 0


async def test_what_waits_for_room_is_not_overtaken_by_the_end_that_follows(store, server):
    record = store.record_spans

    async def late(spans):
        for _ in range(3):
            await asyncio.sleep(0)
        await record(spans)

    store.record_spans = late
    lease = await _lease(store)
    span = Span(id="s", rollout_id=lease.rollout.id, attempt=1, name="tool")
    questions = [
        verbs.RecordSpans(spans=(span,)),
        verbs.Finish(lease=verbs.held(lease), outcome=DONE),
    ]
    body = pack(questions, "questions")
    answer = await post(server.url, "batch", body, make_role_keys(store.secret).worker)
    assert [done for done, _ in msgspec.msgpack.decode(answer.content)] == [True, True]
    (result,) = await store.results([lease.rollout.id])
    assert [one.id for one in result.spans] == ["s"]


async def test_a_server_that_comes_back_finds_its_clients_waiting(store):
    port = free_port()
    async with client_of(store, port, "admin") as admin:
        async with listening(store, port):
            await admin.enqueue([rollout("a")])
            (lease,) = await admin.claim("w")
            waiting = asyncio.create_task(admin.claim("w", wait_s=WAIT_S))
            ended = asyncio.create_task(admin.wait_finished(["a"], timeout_s=WAIT_S))
            await admin.heartbeat([lease])
        finishing = asyncio.create_task(admin.finish(lease, DONE))
        await asyncio.sleep(0)
        async with listening(store, port):
            assert await finishing == "succeeded"
            assert await ended == ["a"]
            await admin.enqueue([rollout("b")])
            assert [lease.rollout.id for lease in await waiting] == ["b"]


async def test_who_waits_when_the_run_comes_to_its_end_hears_it_and_asks_no_more(store):
    async with listening_to_the_end(store) as server:
        admin = StoreClient(server.url, make_role_keys(store.secret).admin, patience_s=WAIT_S)
        worker = StoreClient(server.url, make_role_keys(store.secret).worker, patience_s=WAIT_S)
        await admin.enqueue([rollout("a")])
        (lease,) = await admin.claim("w")
        worker.on_attempt_end(lambda *_: None)
        await worker.heartbeat([])  # from now on it follows the ends of attempts
        waiting = [
            asyncio.create_task(admin.claim("w", wait_s=WAIT_S)),
            asyncio.create_task(admin.wait_finished(["a"], timeout_s=WAIT_S)),
            asyncio.create_task(worker.over()),
        ]
        await admin.heartbeat([lease])
    async with asyncio.timeout(WAIT_S / 3):  # their patience would last longer
        for task in waiting:
            with pytest.raises(RunOver, match=r"^the run is over$"):
                await task
        for client in (admin, worker):
            with pytest.raises(RunOver):
                await client.finish(lease, DONE)
            await client.close()


async def test_who_is_between_two_questions_when_the_run_comes_to_its_end_hears_it_too(
    store, monkeypatch
):
    monkeypatch.setattr("fulmen.server.store_api.LINGER_S", WAIT_S)
    keys = make_role_keys(store.secret)
    api = StoreApi(store, keys)
    async with (
        Listening(Starlette(routes=api.routes()), "127.0.0.1", 0) as server,
        client_of(store, server.port) as worker,
    ):
        await worker.heartbeat([])
        api.run_is_over()
        closing = asyncio.create_task(api.aclose())
        await asyncio.sleep(0)
        with pytest.raises(RunOver):
            await worker.claim("w", wait_s=WAIT_S)
        assert (await post(server.url, "heartbeat", b"", keys.worker)).status_code == 410
        assert (await post(server.url, "heartbeat", b"")).status_code == 401
        assert closing.cancel()


async def test_a_run_over_which_nobody_elsewhere_has_worked_ends_at_once(store):
    began = time.monotonic()
    async with listening_to_the_end(store):
        pass
    assert time.monotonic() - began < LINGER_S


async def test_a_server_that_stays_away_is_given_up(store, caplog):
    port = free_port()
    client = StoreClient(f"http://127.0.0.1:{port}", "key", patience_s=0.2)
    with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{port}: no store for 0 s .*see whether"):
        await client.heartbeat([])
    assert "is away" in caplog.text
    await client.close()


async def test_what_was_promised_and_cannot_be_sent_is_told_to_all_who_come_later(store):
    client = StoreClient(f"http://127.0.0.1:{free_port()}", "key", patience_s=0.1)
    await client.record_spans([Span(id="s", rollout_id="a", attempt=1, name="tool")])
    with pytest.raises(StoreError, match="no store for"):
        await client.finish(await _lease(store), DONE)
    with pytest.raises(StoreError, match="no store for"):
        await client.close()


async def test_a_network_cut_that_is_shorter_than_the_lease_costs_nothing(store, server):
    proxy = Proxy(server.port)
    async with client_of(store, proxy.port) as worker, expiring(store, every_s=0.01):
        await store.enqueue([rollout("a"), rollout("b")])
        (lease,) = await worker.claim("w", lease_s=60)
        waiting = asyncio.create_task(worker.claim("w", wait_s=WAIT_S))
        assert [x.rollout.id for x in await waiting] == ["b"]
        proxy.cut()
        finishing = asyncio.create_task(worker.finish(lease, DONE))
        heartbeat = asyncio.create_task(worker.heartbeat(waiting.result()))
        await asyncio.wait({finishing}, timeout=0.2)
        assert not finishing.done()
        proxy.open = True
        assert await finishing == "succeeded"
        assert await heartbeat == []
    assert (await store.counts())["running"] == 1
    proxy.close()


async def test_after_a_network_cut_longer_than_the_lease_the_attempt_is_lost_and_another_is_made(
    store, server
):
    proxy = Proxy(server.port)
    async with client_of(store, proxy.port) as worker, expiring(store, every_s=0.01):
        ends = asyncio.Queue[tuple[str, int]]()
        worker.on_attempt_end(lambda *end: ends.put_nowait(end))
        await store.enqueue([rollout("a")])
        (lease,) = await worker.claim("w", lease_s=0.3)
        proxy.cut()
        (other,) = await store.claim("elsewhere", wait_s=WAIT_S)  # woken by the end of the lease
        assert other.attempt == 2
        proxy.open = True
        assert await asyncio.wait_for(ends.get(), WAIT_S) == ("a", 1)
        with pytest.raises(LeaseLost, match="rollout a, attempt 1"):
            await worker.finish(lease, Outcome(output="late"))
        assert await store.finish(other, DONE) == "succeeded"
    proxy.close()


# --- ends


async def test_a_client_remembers_no_lease_that_has_ended(store, worker):
    ended = heard(worker)
    await store.enqueue([rollout("a"), rollout("b")])
    await worker.heartbeat([])
    first, _ = await worker.claim("w", limit=2)
    await store.cancel(["b"])
    assert await ended(1) == [("b", 1)]
    await store.cancel(["a"])
    with pytest.raises(LeaseLost):
        await worker.finish(first, DONE)
    assert worker._held == {}


async def test_a_client_is_closed_while_what_it_asked_is_given_up(store, worker):
    asking = asyncio.create_task(worker.heartbeat([]))
    await asyncio.sleep(0)
    asking.cancel()
    await worker.close()


async def test_what_cannot_be_sent_at_all_is_told_to_who_asked(store):
    client = StoreClient("http://127.0.0.1:port", "key")
    with pytest.raises(StoreError, match="could not be sent"):
        await asyncio.wait_for(client.heartbeat([]), WAIT_S)
    await client.close()


async def test_ends_that_were_missed_are_found_by_asking_about_what_one_holds(store):
    port = free_port()
    async with client_of(store, port) as worker:
        ends = asyncio.Queue[tuple[str, int]]()
        worker.on_attempt_end(lambda *end: ends.put_nowait(end))
        async with listening(store, port):
            await store.enqueue([rollout("a"), rollout("b")])
            a, _ = await worker.claim("w", limit=2)
            await worker.heartbeat([a])
        await store.cancel(["a"])  # between two servers, of which the next knows nothing of it
        async with listening(store, port):
            assert await asyncio.wait_for(ends.get(), WAIT_S) == ("a", 1)


def test_a_list_of_ends_tells_who_comes_late_to_look_again():
    async def scenario() -> None:
        ends = EndsList(most=2)
        first = await ends.since("", 0, wait_s=0)
        for number in (1, 2, 3):
            ends.add("a", number)
        assert (await ends.since(first.epoch, 0, wait_s=0)).missed
        assert (await ends.since(first.epoch, 1, wait_s=0)).ended == (("a", 2), ("a", 3))
        assert (await ends.since("another server's", 3, wait_s=0)).missed
        last = await ends.since(first.epoch, 3, wait_s=0.01)
        assert (last.last, last.ended, last.missed) == (3, (), False)

    asyncio.run(scenario())


# --- workers elsewhere


@asynccontextmanager
async def working(
    agent: Path, server: str, key_file: Path, *more: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`fulmen work` in a process of its own."""
    process = await _begin(agent, server, key_file, *more)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _begin(
    agent: Path, server: str, key_file: Path, *more: str
) -> asyncio.subprocess.Process:
    command = ("-m", "fulmen.cli.main", "work", "--server", server, "--agent", f"{agent}:solve")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "--key-file", str(key_file), *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.fixture
def key_file(store: SqlStore, tmp_path: Path) -> Path:
    file = tmp_path / "worker.key"
    file.write_text(make_role_keys(store.secret).worker + "\n")
    return file


async def test_fulmen_work_runs_agents_for_a_store_elsewhere_and_ends_in_order(
    store, server, key_file, tmp_path
):
    agent = tmp_path / "agent.py"
    agent.write_text("import os\n\ndef solve(task):\n    return [task['n'], os.getppid()]\n")
    names = [f"r{i}" for i in range(20)]
    await store.enqueue([rollout(name) for name in names])
    async with working(
        agent, server.url, key_file, "--workers", "4", "--processes", "1"
    ) as process:
        left = set(names)
        while left:
            left -= set(await store.wait_finished(sorted(left), timeout_s=WAIT_S))
        results = await store.results(names)
        assert {tuple(result.outcome.output) for result in results} == {(1, process.pid)}
        process.terminate()
        said = await _said(process)
    assert process.returncode == 0, said
    assert "4 agents at once" in said
    assert "ended; 20 attempts, failures: none" in said


async def test_a_worker_that_is_stopped_gives_its_rollouts_to_others(
    store, server, key_file, tmp_path
):
    agent = tmp_path / "agent.py"
    begun = tmp_path / "begun"
    agent.write_text(
        "import time, pathlib\n\n"
        f"def solve(task):\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)\n"
    )
    await store.enqueue([rollout("a")])
    async with working(agent, server.url, key_file, "--workers", "1") as process:
        await _until(begun.exists)
        process.terminate()
        (lease,) = await store.claim("elsewhere", wait_s=WAIT_S)
        assert lease.attempt == 2
        said = await _said(process)
    assert process.returncode == 0, said


async def test_a_worker_ends_in_order_when_the_run_is_over_though_all_its_agents_are_at_work(
    store, key_file, tmp_path
):
    agent = tmp_path / "agent.py"
    begun = tmp_path / "begun"
    agent.write_text(
        "import asyncio, pathlib\n\nasync def solve(task):\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n    await asyncio.sleep(600)\n"
    )
    await store.enqueue([rollout("a")])
    async with listening_to_the_end(store) as server:
        key = ("--workers", "1", "--lease-s", "600")  # no heartbeat will come upon it
        process = await _begin(agent, server.url, key_file, *key)
        await _until(begun.exists)
    said = await _said(process)
    assert process.returncode == 0, said
    assert "the run is over; 1 attempts, failures: 1 infrastructure" in said


async def test_an_attempt_that_is_cancelled_is_stopped_at_once_on_another_machine(
    store, server, key_file, tmp_path
):
    agent = tmp_path / "agent.py"
    begun, over = tmp_path / "begun", tmp_path / "over"
    agent.write_text(
        "import asyncio, pathlib\n\nasync def solve(task):\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n    try:\n        await asyncio.sleep(600)\n"
        f"    finally:\n        pathlib.Path({str(over)!r}).touch()\n"
    )
    await store.enqueue([rollout("a")])
    async with working(agent, server.url, key_file, "--workers", "1"):
        await _until(begun.exists)
        began = time.monotonic()
        await store.cancel(["a"])
        await _until(over.exists)
        assert time.monotonic() - began < 10  # a third of a lease would be 20 s


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--server": "localhost:80"}, "server 'localhost:80' is no URL of the form http://"),
        ({"--server": "http://localhost:port"}, "'http://localhost:port' is no URL of the form"),
        ({"--key-file": "nowhere.key"}, "nowhere.key: the key cannot be read"),
        ({"--agent": "nowhere.py:solve"}, "no such file nowhere.py"),
    ],
)
async def test_bad_settings_of_a_worker_are_one_line(server, key_file, change, words):
    flags = {"--server": server.url, "--key-file": str(key_file), "--agent": "cat"} | change
    command = [word for flag in flags.items() for word in flag]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fulmen.cli.main", "work", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = await _said(process)
    assert (process.returncode, said.count("\n"), words in said) == (2, 1, True), said


async def test_a_key_of_another_run_ends_a_worker_with_a_remedy(server, tmp_path):
    file = tmp_path / "other.key"
    file.write_text(make_role_keys(b"another run").worker)
    agent = tmp_path / "agent.py"
    agent.write_text("def solve(task):\n    return 1\n")
    async with working(agent, server.url, file) as process:
        said = await _said(process)
    assert process.returncode == 2
    assert "the key is not one of this run's store; give the key in worker.key" in said


async def test_a_run_without_agents_says_how_to_start_some_and_warns_when_none_come(store):
    notes: list[Note] = []
    warned = asyncio.Event()

    def listen(event: object) -> None:
        assert isinstance(event, Note)
        notes.append(event)
        if event.level == "warning":
            warned.set()

    await store.enqueue([rollout("a")])
    command = "fulmen work --server http://a:1 --agent cat --key-file /x/worker.key"
    async with Elsewhere(store, command, listen, look_s=0.01, idle_looks=3):
        await asyncio.wait_for(warned.wait(), WAIT_S)
    assert [(note.level, command in note.text) for note in notes] == [
        ("info", True),
        ("warning", True),
    ]


async def _until(true: Any) -> None:
    """Look at a file again and again: there is nothing to be woken by."""
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(0.02)


async def _said(process: asyncio.subprocess.Process) -> str:
    output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    return output.decode()
