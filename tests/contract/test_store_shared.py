"""Several processes on one PostgreSQL database: they hear of each other, and survive the server."""

import asyncio
import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable

import psycopg
import pytest
from msgspec import structs
from sqlalchemy import event

from databases import PASSWORD, Postgres, Proxy
from fulmen.schema.errors import StoreError
from fulmen.schema.place import schema_of, without_schema
from fulmen.schema.records import Call, Lease, Outcome, Retry, Rollout, Span, Task, VersionSpan
from fulmen.store import leasing
from fulmen.store.database import Change
from fulmen.store.jobs import Job
from fulmen.store.leasing import Claim
from fulmen.store.news import from_notice, to_notices
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore

DONE = Outcome(output="42")
WAIT_S = 60.0
"""Longer than any of these tests takes: what waits so long was not woken."""


@pytest.fixture
def place(postgres: Postgres) -> str:
    return postgres.url()


@pytest.fixture
async def stores(place: str) -> AsyncIterator[tuple[SqlStore, SqlStore]]:
    """Two stores on one schema: to the database they are two processes."""
    here, there = open_store(place), open_store(place)
    yield here, there
    await here.close()
    await there.close()


@pytest.fixture
async def proxied(
    postgres: Postgres, place: str
) -> AsyncIterator[tuple[SqlStore, SqlStore, Proxy]]:
    """Two stores on one schema; the second sees the server through a proxy."""
    proxy = Proxy(postgres.port)
    here = open_store(place)
    there = open_store(postgres.url(schema_of(place), port=proxy.port))
    yield here, there, proxy
    proxy.open = True
    await there.close()
    await here.close()
    proxy.close()


def rollout(name: str) -> Rollout:
    return Rollout(id=name, task=Task(id="t1", input="x"), group="g1", step=1)


def call(lease: Lease, index: int) -> Call:
    return Call(
        id=f"c{index}",
        rollout_id=lease.rollout.id,
        attempt=lease.attempt,
        index=index,
        protocol="chat",
        prompt_ids=(1,),
        completion_ids=(2,),
        logprobs=(-0.5,),
        versions=(VersionSpan(start=0, version=0),),
        temperature=1.0,
        top_p=1.0,
        finish_reason="stop",
    )


async def reached(store: SqlStore) -> None:
    """Return when all that was started before has reached the store's writer."""
    await asyncio.sleep(0)
    await store.heartbeat([])


async def all_finished(store: SqlStore, names: list[str]) -> None:
    left = set(names)
    while left:
        done = await store.wait_finished(sorted(left), timeout_s=WAIT_S)
        assert done, f"not woken; left: {sorted(left)}"
        left -= set(done)


# --- what one does, another hears


async def test_a_waiting_claim_is_woken_by_an_enqueue_of_another_process(stores):
    here, there = stores
    waiting = asyncio.create_task(here.claim("w1", wait_s=WAIT_S))
    await reached(here)
    await there.enqueue([rollout("a")])
    assert [lease.rollout.id for lease in await waiting] == ["a"]


async def test_a_waiting_claim_is_woken_by_a_retry_of_another_process(stores):
    here, there = stores
    await there.enqueue([rollout("a")])
    (lease,) = await there.claim("w2")
    waiting = asyncio.create_task(here.claim("w1", wait_s=WAIT_S))
    await reached(here)
    await there.finish(lease, Outcome(failure="infrastructure"))
    assert [(x.rollout.id, x.attempt) for x in await waiting] == [("a", 2)]


async def test_a_waiting_claim_is_given_what_another_process_lets_rest(stores):
    here, there = stores
    await there.enqueue([structs.replace(rollout("a"), retry=Retry(pause_s=0.2))])
    (lease,) = await there.claim("w2")
    waiting = asyncio.create_task(here.claim("w1", wait_s=WAIT_S))
    await reached(here)
    begun = time.monotonic()
    await there.finish(lease, Outcome(failure="infrastructure"))
    await there.close()
    assert [(x.rollout.id, x.attempt) for x in await waiting] == [("a", 2)]
    assert 0.19 < time.monotonic() - begun < 10


async def test_waiting_for_rollouts_ends_with_a_finish_of_another_process(stores):
    here, there = stores
    await here.enqueue([rollout("a"), rollout("b")])
    waiting = asyncio.create_task(here.wait_finished(["a", "b"], timeout_s=WAIT_S))
    await reached(here)
    a, b = await there.claim("w1", limit=2)
    await there.record_calls([call(a, 0)])
    await there.finish(a, DONE)
    assert await waiting == ["a"]
    assert [r.calls for r in await here.results(["a"])] == [(call(a, 0),)]
    await there.finish(b, DONE)


async def test_those_who_follow_attempts_hear_of_ends_in_another_process(stores):
    here, there = stores
    ends: list[tuple[str, int]] = []
    arrived = threading.Event()
    here.on_attempt_end(lambda name, attempt: (ends.append((name, attempt)), arrived.set()))
    await there.enqueue([rollout("a")])
    (lease,) = await there.claim("w1")
    await there.finish(lease, DONE)
    assert await asyncio.to_thread(arrived.wait, WAIT_S)
    assert ends == [("a", 1)]


async def test_claimers_in_several_processes_never_get_the_same_rollout(stores):
    names = [f"r{i}" for i in range(60)]
    await stores[0].enqueue([rollout(name) for name in names])
    taken: list[Lease] = []

    async def work(store: SqlStore, worker: str) -> None:
        while leases := await store.claim(worker, limit=3):
            taken.extend(leases)
            for lease in leases:
                assert await store.finish(lease, DONE) == "succeeded"

    await asyncio.gather(*(work(store, f"w{i}") for i, store in enumerate((*stores, *stores))))
    assert sorted(lease.rollout.id for lease in taken) == sorted(names)
    assert {lease.attempt for lease in taken} == {1}


async def test_rollouts_that_two_processes_queue_at_once_are_queued_once(stores):
    asked = [rollout(f"r{i}") for i in range(200)]
    new = await asyncio.gather(*(store.enqueue(asked) for store in stores))
    assert sum(new) == 200
    assert (await stores[0].counts())["queued"] == 200


async def test_a_claim_does_not_overlook_what_another_process_holds_and_leaves(stores, place):
    here, _ = stores
    await here.enqueue([rollout("a")])
    with psycopg.connect(without_schema(place), autocommit=False) as other:
        other.execute(f"SELECT 1 FROM {schema_of(place)}.rollouts FOR UPDATE".encode())
        waiting = asyncio.create_task(here.claim("w1", wait_s=WAIT_S))
        await asyncio.to_thread(_blocked, place)
        other.rollback()  # as the end of a process would; nobody is told
    assert [lease.rollout.id for lease in await waiting] == ["a"]


async def test_nor_does_one_that_others_of_its_batch_leave_nothing(stores, place):
    here, _ = stores
    await here.enqueue([rollout(name) for name in "abc"])
    claims = [Claim([("w1", 2)], 60.0), Claim([("w2", 1)], 60.0)]

    def take() -> list[list[str]]:
        with here._database.writing.begin() as connection:
            taken = leasing.take(connection, claims, secret=b"secret")
        return [[lease.rollout.id for lease in change.value] for change in taken]

    with psycopg.connect(without_schema(place), autocommit=False) as other:
        held = f"SELECT 1 FROM {schema_of(place)}.rollouts WHERE id = 'c' FOR UPDATE"
        other.execute(held.encode())
        taking = asyncio.create_task(asyncio.to_thread(take))
        await asyncio.to_thread(_blocked, place)
        other.rollback()
    assert await taking == [["a", "b"], ["c"]]


def _blocked(place: str) -> None:
    """Return when a transaction waits for another's lock."""
    asked = b"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with psycopg.connect(without_schema(place), autocommit=True) as server:
        until = time.monotonic() + WAIT_S
        while server.execute(asked).fetchone() == (0,):
            assert time.monotonic() < until


async def test_more_news_than_notifications_hold_makes_others_look_for_themselves(stores):
    here, there = stores
    names = [f"{'long' * 40}-{i}" for i in range(3000)]
    await here.enqueue([rollout(name) for name in names])
    waiting = asyncio.create_task(here.wait_finished(names[-1:], timeout_s=WAIT_S))
    await reached(here)
    assert await there.cancel(names) == 3000
    assert await waiting == names[-1:]


def test_notices_fit_into_notifications_and_say_all():
    finished = tuple(f"rollout-{i}" for i in range(1500))
    ended = tuple((name, 1) for name in finished)
    notices = to_notices(
        "me", [Change(None, queued=3), Change(None, finished=finished, ended=ended)]
    )
    assert len(notices) > 5
    assert max(len(notice.encode()) for notice in notices) < 8000
    heard = [change for _, change in map(from_notice, notices) if change]
    assert sum(change.queued for change in heard) == 3
    assert tuple(name for change in heard for name in change.finished) == finished
    assert tuple(end for change in heard for end in change.ended) == ended


# --- real processes

OTHER = """
import asyncio, sys, time
from fulmen.schema.records import Outcome
from fulmen.store.open import open_store

async def main():
    store = open_store(sys.argv[1])
    print("ready", flush=True)
    while leases := await store.claim("other", wait_s=60):
        for lease in leases:
            if lease.rollout.id == "last":
                await store.finish(lease, Outcome(output=0.0))
                await store.close()
                return
            await store.finish(lease, Outcome(output=time.monotonic()))

asyncio.run(main())
"""


async def test_a_process_is_woken_by_another_and_hears_its_finish_in_milliseconds(place):
    store = open_store(place)
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, place], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout
    assert await asyncio.to_thread(other.stdout.readline) == "ready\n"
    medians = []
    for turn in range(10):
        hearings = []
        for i in range(15):
            name = f"r{turn}-{i}"
            await store.enqueue([rollout(name)])
            assert await store.wait_finished([name], timeout_s=WAIT_S) == [name]
            heard = time.monotonic()
            (result,) = await store.results([name])
            # One clock for all processes of a machine; from before the commit of the finish.
            hearings.append(heard - result.outcome.output)
        medians.append(statistics.median(hearings))
        if medians[-1] < 0.020:
            break  # a machine that is busy with other work may need another turn
    await store.enqueue([rollout("last")])
    await all_finished(store, ["last"])
    assert await asyncio.to_thread(other.wait, WAIT_S) == 0
    other.stdout.close()
    await store.close()
    assert min(medians) < 0.020


# --- a server that goes away


async def test_a_server_restarted_under_load_loses_nothing_and_repeats_nothing(
    stores, postgres, caplog
):
    trainer, host = stores
    names = [f"r{i}" for i in range(150)]
    statuses: list[str] = []
    grown = asyncio.Event()

    async def work(worker: str) -> None:
        while len(statuses) < len(names):
            for lease in await host.claim(worker, limit=2, wait_s=1.0):
                await host.record_calls([call(lease, 0), call(lease, 1)])
                span = Span(id="s", rollout_id=lease.rollout.id, attempt=1, name="tool")
                await host.record_spans([span])
                await host.record_calls([call(lease, 2)])
                statuses.append(await host.finish(lease, DONE))
                grown.set()

    async def restart(times: int) -> None:
        for _ in range(times):
            wanted = len(statuses) + 15
            while len(statuses) < wanted:
                grown.clear()
                await grown.wait()
            await asyncio.to_thread(postgres.stop)
            await asyncio.to_thread(postgres.start)

    async def ask() -> None:
        for start in range(0, len(names), 10):
            new = [rollout(name) for name in names[start : start + 10]]
            assert await trainer.enqueue(new) == 10

    await asyncio.gather(
        ask(), all_finished(trainer, names), restart(4), *(work(f"w{i}") for i in range(6))
    )
    assert statuses == ["succeeded"] * len(names)
    results = await trainer.results(names)
    assert [result.attempt for result in results] == [1] * len(names)
    assert {len(result.calls) for result in results} == {3}
    assert {len(result.spans) for result in results} == {1}
    counts = await trainer.counts()
    assert (counts["succeeded"], counts["running"], counts["queued"]) == (len(names), 0, 0)
    assert [counts[f"refused_{what}"] for what in ("calls", "spans", "results")] == [0, 0, 0]
    assert "trying again" in caplog.text


async def test_a_commit_whose_answer_is_lost_is_not_done_twice(proxied):
    here, there, proxy = proxied
    proxy.hide_commits(1)
    assert await there.enqueue([rollout("a"), rollout("b")]) == 2
    proxy.hide_commits(1)
    (lease,) = await there.claim("w1")
    assert (lease.rollout.id, lease.attempt) == ("a", 1)
    await there.record_calls([call(lease, 0)])
    await reached(there)
    proxy.hide_commits(1)
    assert await there.finish(lease, DONE) == "succeeded"
    assert proxy.hidden == 3
    counts = await here.counts()
    assert (counts["queued"], counts["succeeded"], counts["refused_results"]) == (1, 1, 0)
    (result,) = await here.results(["a"])
    assert (result.attempt, result.calls) == (1, (call(lease, 0),))


async def test_what_a_lost_transaction_did_is_done_again(proxied):
    here, there, proxy = proxied
    await here.enqueue([rollout("a")])
    (lease,) = await there.claim("w1")

    def lose(*_: object) -> None:
        proxy.cut()
        proxy.open = True

    event.listen(there._database.writing, "commit", lose, once=True)
    await there.record_calls([call(lease, 0)])
    assert await there.finish(lease, DONE) == "succeeded"
    (result,) = await here.results(["a"])
    assert result.calls == (call(lease, 0),)


async def test_what_was_not_heard_while_the_connection_was_lost_is_looked_up(proxied):
    here, there, proxy = proxied
    await here.enqueue([rollout("a")])
    (lease,) = await here.claim("w1")
    ends: list[tuple[str, int]] = []
    arrived = threading.Event()
    there.on_attempt_end(lambda name, attempt: (ends.append((name, attempt)), arrived.set()))
    finishing = asyncio.create_task(there.wait_finished(["a"], timeout_s=WAIT_S))
    claiming = asyncio.create_task(there.claim("w2", wait_s=WAIT_S))
    await reached(there)
    proxy.cut()
    await here.finish(lease, DONE)
    await here.enqueue([rollout("b")])
    proxy.open = True
    assert await finishing == ["a"]
    assert [x.rollout.id for x in await claiming] == ["b"]
    assert await asyncio.to_thread(arrived.wait, WAIT_S)
    assert set(ends) == {("a", 1)}


async def test_a_server_that_stays_away_stops_the_store_in_words(postgres, place):
    proxy = Proxy(postgres.port)
    store = open_store(postgres.url(schema_of(place), port=proxy.port), patience_s=0.5)
    await store.enqueue([rollout("a")])
    (lease,) = await store.claim("w1")
    proxy.cut()
    await store.record_calls([call(lease, 0)])
    words = rf"fulmen@127\.0\.0\.1:{proxy.port}/runs\?schema=\w+: the server cannot be reached"
    for later in (store.finish(lease, DONE), store.wait_finished(["a"]), store.close()):
        with pytest.raises(StoreError, match=words):
            await later
    proxy.close()


async def test_work_that_deadlocks_with_another_processes_is_done_again(stores, place):
    here, _ = stores
    await here.enqueue([rollout("a"), rollout("b")])
    leases = await here.claim("w1", limit=2)
    lock = f"SELECT 1 FROM {schema_of(place)}.rollouts WHERE id = %s FOR UPDATE".encode()
    with psycopg.connect(without_schema(place), autocommit=False) as other:
        other.execute("SET deadlock_timeout = '1h'")  # so that the store is the one that gives way
        other.execute(lock, ["b"])
        renewing = asyncio.create_task(here.heartbeat(leases))
        await asyncio.to_thread(_blocked, place)
        await asyncio.to_thread(other.execute, lock, ["a"])
    assert await renewing == []


async def test_batches_of_two_processes_on_the_same_rollouts_do_not_wait_for_each_other(
    stores, caplog
):
    here, there = stores
    await here.enqueue([rollout("a"), rollout("b")])
    a, b = await here.claim("w1", limit=2)
    both_hold, gate = threading.Barrier(2), threading.Event()

    def meet(_conn, _cursor, statement: str, *_: object) -> None:
        if "FOR NO KEY UPDATE" in statement:
            with contextlib.suppress(threading.BrokenBarrierError):  # the other one waits for us
                both_hold.wait(timeout=2)

    renewing = []
    for store, leases in ((here, (a, b)), (there, (b, a))):
        event.listen(store._database.writing, "after_cursor_execute", meet)
        busy = threading.Event()
        held = Job(lambda _, busy=busy: (busy.set(), gate.wait(WAIT_S), Change(None))[-1])
        await store._writer.submit(held)
        assert await asyncio.to_thread(busy.wait, WAIT_S)
        renewing += [asyncio.create_task(store.heartbeat([lease])) for lease in leases]
        await asyncio.sleep(0)  # they are one batch now
    gate.set()
    assert await asyncio.gather(*renewing) == [[]] * 4
    assert "deadlock" not in caplog.text


async def test_a_database_that_forgot_what_it_confirmed_is_not_written_to(stores, place, postgres):
    here, _ = stores
    await here.enqueue([rollout("a")])
    postgres.sql(f"UPDATE {schema_of(place)}.writers SET batch = 0")
    with pytest.raises(StoreError, match="has forgotten what it had confirmed"):
        await here.enqueue([rollout("b")])
    assert (await here.counts())["queued"] == 1


async def test_a_batch_that_fails_for_good_does_not_confuse_the_next(stores, place, postgres):
    here, _ = stores
    schema = schema_of(place)
    await here.enqueue([rollout("a")])
    postgres.sql(f"ALTER TABLE {schema}.rollouts RENAME TO elsewhere")
    with pytest.raises(StoreError, match="UndefinedTable"):
        await here.enqueue([rollout("b")])
    postgres.sql(f"ALTER TABLE {schema}.elsewhere RENAME TO rollouts")
    assert await here.enqueue([rollout("b")]) == 1


# --- what is wrong, in words


def wrong_password(url: str) -> str:
    return url.replace(PASSWORD.replace(" ", "%20"), "guessed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_password, r"refuses the user or the password .*; set PGPASSWORD"),
        (lambda url: url.replace("/runs?", "/walks?"), r'there is no such database .*"walks"'),
        (lambda url: url.replace("schema=test_", "schema=Test-"), "use a-z, 0-9 and _"),
        (lambda url: url.replace("/runs?", "?"), "write postgresql://user@host/database"),
    ],
)
def test_a_place_that_cannot_be_used_is_said_in_words_without_the_password(
    place, change: Callable[[str], str], words
):
    with pytest.raises(StoreError, match=words) as refused:
        open_store(change(place))
    assert str(refused.value).startswith("postgresql://fulmen@127.0.0.1")
    assert "guessed" not in str(refused.value)


def test_no_server_is_said_in_words(place, postgres):
    with contextlib.closing(Proxy(postgres.port)) as gone:
        port = gone.port
    with pytest.raises(StoreError, match="the server cannot be reached"):
        open_store(postgres.url(schema_of(place), port=port))


def test_without_psycopg_the_remedy_is_named(place):
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from fulmen.store.open import open_store\n"
        f"open_store({place!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'needs psycopg; pip install "fulmen[postgres]"' in done.stderr.splitlines()[-1]
