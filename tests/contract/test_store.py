"""One suite for every store: what `fulmen.store.base.Store` promises."""

import asyncio
import contextlib
import math
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from sqlalchemy import Connection, Engine, Select, Update, event, select, update

from fulmen.schema.errors import DataError, LeaseLost, StoreError
from fulmen.schema.keys import KeyRefused, read_key
from fulmen.schema.place import is_url, schema_of, without_schema
from fulmen.schema.records import (
    Call,
    Lease,
    Outcome,
    Retry,
    Reward,
    Rollout,
    Sampling,
    Span,
    StepRecord,
    Task,
    VersionSpan,
)
from fulmen.store import tables
from fulmen.store.database import Change
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore
from fulmen.store.writer import CAPACITY
from stores import AnyStore, ServedClient, behind, heard, served

DONE = Outcome(output="42")
FAR_AHEAD = 1e12
"""Unix time by which every lease is over."""
WAIT_S = 30.0
"""Longer than any of these tests takes: what waits so long was not woken."""


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, path: Path) -> str:
    """Where a store may be that outlives the process."""
    if request.param == "sqlite":
        return str(path)
    return request.getfixturevalue("postgres").url()


def _opened(request: pytest.FixtureRequest, path: Path) -> SqlStore:
    if request.param == "postgresql":
        return open_store(request.getfixturevalue("postgres").url())
    return open_store(str(path) if request.param == "file" else ":memory:")


@pytest.fixture(params=["memory", "file", "postgresql", "http"])
async def store(
    request: pytest.FixtureRequest, path: Path
) -> AsyncIterator[SqlStore | ServedClient]:
    opened = _opened(request, path)
    if request.param == "http":
        async with served(opened) as client:
            yield client
    else:
        yield opened
    await opened.close()


@pytest.fixture(params=["memory", "file", "postgresql"])
async def own_store(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[SqlStore]:
    """A store in this process, where it can be seen at work."""
    opened = _opened(request, path)
    yield opened
    await opened.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.db"


def rollout(name: str, step: int = 1, **retry: Any) -> Rollout:
    task = Task(id="t1", input={"question": "1+1?"}, metadata={"answer": 2})
    return Rollout(id=name, task=task, group="g1", step=step, retry=Retry(**retry))


def call(lease: Lease, index: int, *, choice: int = 0) -> Call:
    return Call(
        id=f"chatcmpl-{index}",
        rollout_id=lease.rollout.id,
        attempt=lease.attempt,
        index=index,
        choice=choice,
        protocol="chat",
        prompt_ids=(1, 151_645),
        completion_ids=(7,),
        logprobs=(-0.5,),
        versions=(VersionSpan(start=0, version=3),),
        temperature=1.0,
        top_p=1.0,
        finish_reason="stop",
    )


def step_record(step: int, *consumed: str) -> StepRecord:
    return StepRecord(step=step, version=step, consumed=consumed, metrics={"loss": 0.5})


async def claimed(store: AnyStore, *names: str, lease_s: float = 60.0) -> list[Lease]:
    await store.enqueue([rollout(name) for name in names])
    return await store.claim("w1", limit=len(names), lease_s=lease_s)


async def finished(store: AnyStore, *names: str) -> list[Lease]:
    leases = await claimed(store, *names)
    for lease in leases:
        await store.finish(lease, DONE)
    return leases


async def reached(store: AnyStore) -> None:
    """Return when all that was started before has reached the store's writer."""
    await asyncio.sleep(0)
    await store.heartbeat([])


async def altered(store: AnyStore, statement: Update) -> None:
    """Change the tables behind the store's back."""

    def work(connection: Connection) -> Change[None]:
        connection.execute(statement)
        return Change(None)

    await behind(store)._write(work)


async def looked(store: AnyStore, query: Select[Any]) -> float:
    def work(connection: Connection) -> Change[float]:
        return Change(connection.execute(query).scalar_one())

    return await behind(store)._write(work)


class Hold:
    """Stops the store's writer at every end of an attempt, after the commit."""

    def __init__(self, store: AnyStore) -> None:
        self._arrived, self._free = threading.Semaphore(0), threading.Semaphore(0)
        behind(store).on_attempt_end(self._stop)

    def _stop(self, *_: object) -> None:
        self._arrived.release()
        assert self._free.acquire(timeout=WAIT_S)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._arrived.acquire, timeout=WAIT_S)

    def release(self, times: int = 1) -> None:
        self._free.release(times)


def state(place: str, statement: str) -> list[tuple[object, ...]]:
    """Run a statement on a store's database, beside the store."""
    if is_url(place):
        import psycopg

        options = f"-c search_path={schema_of(place)}"
        with psycopg.connect(without_schema(place), options=options) as server:
            cursor = server.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
    with contextlib.closing(sqlite3.connect(place)) as file, file:
        return file.execute(statement).fetchall()


def names_of(leases: list[Lease]) -> list[str]:
    return [lease.rollout.id for lease in leases]


# --- the queue


async def test_rollouts_are_claimed_in_the_order_they_were_queued(store):
    await store.enqueue([rollout("b"), rollout("a")])
    await store.enqueue([rollout("c")])
    assert names_of(await store.claim("w1", limit=2)) == ["b", "a"]
    assert names_of(await store.claim("w1", limit=2)) == ["c"]


async def test_a_rollout_that_is_known_is_not_queued_again(store):
    assert await store.enqueue([rollout("a"), rollout("a", step=9)]) == 1
    await store.claim("w1")
    assert await store.enqueue([rollout("a", step=9), rollout("b")]) == 1
    assert names_of(await store.claim("w1", limit=5)) == ["b"]


async def test_an_empty_queue_gives_no_lease(store):
    assert await store.claim("w1") == []
    assert await store.claim("w1", wait_s=0.01) == []


async def test_a_waiting_claim_gets_the_rollout_queued_later(store):
    waiting = asyncio.create_task(store.claim("w1", wait_s=WAIT_S))
    await reached(store)
    await store.enqueue([rollout("a")])
    assert names_of(await waiting) == ["a"]


async def test_waiting_claims_are_served_in_turn(store):
    waiting = []
    for worker in ("w1", "w2", "w3"):
        waiting.append(asyncio.create_task(store.claim(worker, limit=2, wait_s=WAIT_S)))
        await reached(store)
    await store.enqueue([rollout(name) for name in "abc"])
    assert [names_of(await task) for task in waiting[:2]] == [["a", "b"], ["c"]]
    await store.enqueue([rollout("d")])
    assert names_of(await waiting[2]) == ["d"]


async def test_a_waiting_claim_is_woken_by_a_retry(store):
    (lease,) = await claimed(store, "a")
    waiting = asyncio.create_task(store.claim("w2", wait_s=WAIT_S))
    await reached(store)
    await store.finish(lease, Outcome(failure="infrastructure"))
    assert [(x.rollout.id, x.attempt) for x in await waiting] == [("a", 2)]


async def test_a_cancelled_claim_takes_nothing_with_it(store):
    gone = asyncio.create_task(store.claim("w1", wait_s=WAIT_S))
    waiting = asyncio.create_task(store.claim("w2", wait_s=WAIT_S))
    await reached(store)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await store.enqueue([rollout("a")])
    assert [(x.worker, x.attempt) for x in await waiting] == [("w2", 1)]


async def test_a_lease_that_is_given_back_again_takes_nothing_from_who_has_the_rollout_now(
    own_store,
):
    await own_store.enqueue([rollout("a")])
    (unseen,) = await own_store.claim("w1")
    await own_store.give_back([unseen])
    (lease,) = await own_store.claim("w2")
    assert lease.attempt == unseen.attempt == 1
    await own_store.give_back([unseen])
    assert await own_store.heartbeat([lease]) == []
    await own_store.give_back([unseen])
    assert await own_store.finish(lease, DONE) == "succeeded"


async def test_leases_that_reach_a_cancelled_claim_return_to_the_queue(own_store):
    await own_store.enqueue([rollout("a", attempts=1)])
    gone = asyncio.create_task(own_store.claim("w1"))
    await asyncio.sleep(0)
    # This loop stands still until the claim has been granted, so it learns of it too late.
    elsewhere = threading.Thread(target=lambda: asyncio.run(own_store.heartbeat([])))
    elsewhere.start()
    elsewhere.join()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    (lease,) = await own_store.claim("w2", wait_s=WAIT_S)
    assert (lease.attempt, lease.worker) == (1, "w2")


async def test_a_claim_cancelled_while_it_is_granted_leaves_the_rollout_in_the_queue(own_store):
    first, second = await claimed(own_store, "x", "y")
    await own_store.enqueue([rollout("a", attempts=1)])
    hold = Hold(own_store)
    ends = [asyncio.create_task(own_store.finish(first, DONE))]
    await hold.reached()
    ends.append(asyncio.create_task(own_store.finish(second, DONE)))
    await asyncio.sleep(0)
    gone = asyncio.create_task(own_store.claim("w1"))
    await asyncio.sleep(0)
    hold.release()
    await hold.reached()  # "y" and the claim are on disk; the claim has not been answered
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    hold.release()
    assert await asyncio.gather(*ends) == ["succeeded", "succeeded"]
    (lease,) = await own_store.claim("w2", wait_s=WAIT_S)
    assert (lease.attempt, lease.worker) == (1, "w2")


def test_claimers_in_several_threads_never_get_the_same_rollout(place):
    store, taken = open_store(place), []

    async def work(worker: str) -> None:
        while leases := await store.claim(worker, limit=3):
            taken.extend(leases)
            for lease in leases:
                await store.finish(lease, DONE)

    asyncio.run(store.enqueue([rollout(f"r{i}") for i in range(100)]))
    threads = [threading.Thread(target=lambda w=w: asyncio.run(work(w))) for w in ("w1", "w2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(store.close())
    assert sorted(names_of(taken)) == sorted(f"r{i}" for i in range(100))
    assert {lease.attempt for lease in taken} == {1}


async def test_a_claim_is_woken_by_an_enqueue_on_another_event_loop(store):
    waiting = asyncio.create_task(store.claim("w1", wait_s=WAIT_S))
    await reached(store)
    await asyncio.to_thread(lambda: asyncio.run(store.enqueue([rollout("a")])))
    assert names_of(await waiting) == ["a"]


async def test_the_key_of_a_lease_states_the_attempt_and_how_to_sample(store):
    sampling = Sampling(temperature=0.7, max_tokens=64)
    task = Task(id="t1", input="x")
    asked = Rollout(
        id="a", task=task, group="g", step=1, split="eval", seed=5, sampling=sampling, deadline_s=9
    )
    await store.enqueue([asked])
    (lease,) = await store.claim("w1", lease_s=60)
    claims = read_key(lease.key, behind(store).secret)
    assert (claims.rollout_id, claims.attempt, claims.seed) == ("a", 1, 5)
    assert (claims.sampling, claims.trained) == (sampling, False)
    begun = lease.expires - 60
    assert begun + 9 < claims.expires < begun + 9 + 300
    assert lease.rollout == asked


# --- leases and fencing


async def test_a_late_result_of_a_replaced_attempt_is_refused(store):
    (old,) = await claimed(store, "a", lease_s=0)
    assert await store.expire_leases(now=FAR_AHEAD) == ["a"]
    (new,) = await store.claim("w2")
    with pytest.raises(LeaseLost, match="rollout a, attempt 1"):
        await store.finish(old, Outcome(output="late"))
    assert await store.finish(new, DONE) == "succeeded"
    (result,) = await store.results(["a"])
    assert (result.attempt, result.outcome) == (2, DONE)
    assert (await store.counts())["refused_results"] == 1


async def test_a_result_that_comes_twice_is_refused_the_second_time(store):
    (lease,) = await finished(store, "a")
    with pytest.raises(LeaseLost):
        await store.finish(lease, Outcome(failure="agent"))
    assert [r.outcome for r in await store.results(["a"])] == [DONE]


async def test_late_calls_and_spans_are_refused_and_counted(store):
    (old,) = await claimed(store, "a")
    await store.record_calls([call(old, 0)])
    await store.finish(old, Outcome(failure="infrastructure"))
    (new,) = await store.claim("w2")
    await store.record_calls([call(old, 1), call(new, 0)])
    await store.record_spans([Span(id="s1", rollout_id="a", attempt=1, name="tool")])
    await store.finish(new, DONE)
    (result,) = await store.results(["a"])
    assert result.calls == (call(new, 0),)
    counts = await store.counts()
    assert (counts["refused_calls"], counts["refused_spans"]) == (1, 1)


async def test_a_span_that_ended_takes_the_place_of_its_start_and_an_open_one_stays_open(store):
    (lease,) = await claimed(store, "a")
    begun = Span(id="s1", rollout_id="a", attempt=1, name="tool", started=2.0)
    open_one = Span(id="s0", rollout_id="a", attempt=1, name="agent", started=1.0)
    await store.record_spans([begun, open_one])
    ended = structs.replace(begun, ended=3.0, status="error", attributes={"error.type": "KeyError"})
    await store.record_spans([ended])
    await store.finish(lease, DONE)
    (result,) = await store.results(["a"])
    assert result.spans == (open_one, ended)


async def test_only_leases_that_are_over_expire(store):
    await claimed(store, "a", "b")
    assert await store.expire_leases() == []
    assert await store.expire_leases(now=FAR_AHEAD) == ["a", "b"]
    assert (await store.counts())["queued"] == 2


async def test_a_heartbeat_renews_a_lease_and_names_those_that_are_lost(store):
    kept, lost = await claimed(store, "a", "b", lease_s=0)
    await store.cancel(["b"])
    assert await store.heartbeat([kept, lost], lease_s=60) == [lost]
    assert await store.expire_leases() == []


async def test_those_who_follow_attempts_hear_of_every_end(store):
    ends = heard(store)
    a, *_ = await claimed(store, "a", "b", "c")
    await store.enqueue([rollout("never-begun"), rollout("d", step=2)])
    await store.finish(a, DONE)
    assert await ends(1) == [("a", 1)]
    await store.cancel(["b", "never-begun"])
    assert await ends(2) == [("a", 1), ("b", 1)]
    await store.expire_leases(now=FAR_AHEAD)
    assert await ends(3) == [("a", 1), ("b", 1), ("c", 1)]
    await store.claim("w1", limit=2)
    await store.discard_after(1)
    assert await ends(4) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]


# --- retries, rests and deadlines

RESTS: dict[str, Any] = {"pause_s": 3600.0, "longest_pause_s": 3600.0}
"""Longer than any of these tests takes."""


async def test_a_rollout_says_which_failures_are_tried_again_and_how_often(store):
    await store.enqueue([rollout("a", on=("agent",), attempts=2), rollout("b", on=())])
    a, b = await store.claim("w1", limit=2)
    assert await store.finish(a, Outcome(failure="agent", error="KeyError")) == "queued"
    assert await store.finish(b, Outcome(failure="infrastructure")) == "failed"
    (again,) = await store.claim("w1", limit=2)
    assert (again.rollout.id, again.attempt) == ("a", 2)
    assert await store.finish(again, Outcome(failure="agent", error="KeyError")) == "failed"


async def test_a_rollout_that_rests_is_passed_over_and_counted_as_queued(store):
    await store.enqueue([rollout("a", **RESTS), rollout("b")])
    (a,) = await store.claim("w1")
    assert await store.finish(a, Outcome(failure="infrastructure")) == "queued"
    assert names_of(await store.claim("w1", limit=2)) == ["b"]
    assert await store.claim("w1") == []
    assert (await store.counts())["queued"] == 1
    assert await store.cancel(["a"]) == 1


@pytest.mark.parametrize("waits", ["before", "after"])
async def test_a_claim_that_waits_is_given_a_rollout_when_it_has_rested(store, waits):
    await store.enqueue([rollout("a", pause_s=0.2)])
    (lease,) = await store.claim("w1")
    begun = time.monotonic()
    if waits == "before":
        waiting = asyncio.create_task(store.claim("w2", wait_s=WAIT_S))
        await reached(store)
        await store.finish(lease, Outcome(failure="timeout"))
    else:
        await store.finish(lease, Outcome(failure="timeout"))
        waiting = asyncio.create_task(store.claim("w2", wait_s=WAIT_S))
    (again,) = await waiting
    assert (again.rollout.id, again.attempt) == ("a", 2)
    assert 0.19 < time.monotonic() - begun < 5


async def test_many_claims_that_wait_share_what_comes_due_at_different_times(store):
    pauses = [0.05, 0.3, 0.15, 0.15]
    await store.enqueue([rollout(f"r{n}", pause_s=pause) for n, pause in enumerate(pauses)])
    waiting = []
    for lease in await store.claim("w1", limit=4):
        await store.finish(lease, Outcome(failure="infrastructure"))
        waiting.append(asyncio.create_task(store.claim("w2", wait_s=WAIT_S)))
    given = await asyncio.gather(*waiting)
    assert sorted(lease.rollout.id for (lease,) in given) == ["r0", "r1", "r2", "r3"]


async def test_while_a_rollout_rests_the_writer_sleeps(store):
    await store.enqueue([rollout("a", pause_s=0.5)])
    (lease,) = await store.claim("w1")
    await store.finish(lease, Outcome(failure="infrastructure"))
    transactions = []
    engine = behind(store)._database.writing
    event.listen(engine, "begin", transactions.append)
    assert len(await store.claim("w1", wait_s=WAIT_S)) == 1
    assert len(transactions) <= 3


async def test_a_rest_that_a_clock_set_back_has_made_endless_is_over(store):
    await store.enqueue([rollout("a", **RESTS)])
    (lease,) = await store.claim("w1")
    await store.finish(lease, Outcome(failure="infrastructure"))
    await altered(store, update(tables.rollouts).values(not_before=tables.now() + 86400.0))
    assert names_of(await store.claim("w1")) == ["a"]


async def test_the_rest_of_an_expired_lease_can_be_waited_for(store):
    await store.enqueue([rollout("a", pause_s=0.1)])
    await store.claim("w1")
    waiting = asyncio.create_task(store.claim("w2", wait_s=WAIT_S))
    await reached(store)
    await store.expire_leases(now=FAR_AHEAD)
    assert names_of(await waiting) == ["a"]


async def test_an_attempt_far_past_its_deadline_ends_although_its_worker_renews_the_lease(store):
    ends = heard(store)
    await store.enqueue([rollout("a", attempts=1)])
    (lease,) = await store.claim("w1")
    assert await store.expire_leases() == []
    await altered(store, update(tables.rollouts).values(deadline=tables.now() - 0.01))
    assert await store.heartbeat([lease]) == []
    assert await store.expire_leases() == ["a"]
    assert await store.heartbeat([lease]) == [lease]
    (result,) = await store.results(["a"])
    assert result.outcome.failure == "timeout"
    assert await ends(1) == [("a", 1)]
    with pytest.raises(LeaseLost, match="rollout a, attempt 1: it had ended in another way"):
        await store.finish(lease, DONE)


async def test_the_deadline_that_the_store_keeps_leaves_the_worker_time_to_tell(store):
    await store.enqueue([rollout("a")])
    (lease,) = await store.claim("w1", lease_s=0)
    left = select(tables.rollouts.c.deadline - tables.now())
    assert 325 < await looked(store, left) <= 330  # deadline_s and half a minute
    await store.heartbeat([lease], lease_s=60)
    assert 325 < await looked(store, left) <= 330


async def test_an_end_that_is_told_again_gets_the_same_answer_and_changes_nothing(store):
    lost = Outcome(failure="infrastructure", error="lost", output={"b": 1, "a": [math.nan]})
    await store.enqueue([rollout("a", attempts=2)])
    (first,) = await store.claim("w1")
    assert [await store.finish(first, lost) for _ in range(2)] == ["queued", "queued"]
    (second,) = await store.claim("w1")
    assert await store.finish(first, lost) == "queued"
    assert await store.finish(second, DONE) == "succeeded"
    assert await store.finish(second, DONE) == "succeeded"
    assert await store.finish(first, lost) == "queued"
    await store.commit_step(step_record(1, "a"))
    assert await store.finish(second, DONE) == "succeeded"
    assert (await store.counts())["refused_results"] == 0


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("expires", "attempt 2 has begun"),
        ("cancel", "the rollout was cancelled"),
        ("discard", "the rollout was discarded"),
        ("other", "it had ended in another way, and the rollout is succeeded"),
        ("worker", "it had ended in another way, and the rollout is succeeded"),
    ],
)
async def test_a_result_that_comes_too_late_is_told_why(store, ends, why):
    (lease,) = await claimed(store, "a")
    told = lease
    if ends == "expires":
        await store.expire_leases(now=FAR_AHEAD)
        await store.claim("w2")
    elif ends == "cancel":
        await store.cancel(["a"])
    elif ends == "discard":
        await store.discard_after(0)
    else:
        await store.finish(lease, Outcome(output="other") if ends == "other" else DONE)
        told = structs.replace(lease, worker="w2") if ends == "worker" else lease
    with pytest.raises(LeaseLost, match=f"rollout a, attempt 1: {why}; its result was refused"):
        await store.finish(told, DONE)
    assert (await store.counts())["refused_results"] == 1


async def test_an_agent_that_a_model_call_failed_under_is_not_to_blame(store):
    failed = Outcome(failure="agent", error="InternalServerError", log="Traceback")
    await store.enqueue([rollout("a", attempts=2), rollout("b", attempts=2)])
    a, b = await store.claim("w1", limit=2)
    await store.record_calls([structs.replace(call(a, 0), status=500), call(a, 1)])
    await store.record_calls([structs.replace(call(b, 0), status=400)])
    assert [await store.finish(a, failed) for _ in range(2)] == ["queued", "queued"]
    assert await store.finish(b, failed) == "failed"
    (again,) = await store.claim("w1")
    await store.record_calls([structs.replace(call(again, 0), status=502)])
    assert await store.finish(again, failed) == "failed"
    (result,) = await store.results(["a"])
    assert result.outcome.failure == "infrastructure"
    assert result.outcome.error == (
        "a model call ended with 502, and then the agent: InternalServerError"
    )
    assert result.outcome.log == "Traceback"


async def test_an_agent_that_goes_on_after_a_failed_model_call_has_succeeded(store):
    (lease,) = await claimed(store, "a")
    await store.record_calls([structs.replace(call(lease, 0), status=500), call(lease, 1)])
    assert await store.finish(lease, DONE) == "succeeded"


async def test_what_rested_when_the_process_ended_can_be_claimed_by_the_next(path):
    store = open_store(path)
    await store.enqueue([rollout("a", **RESTS)])
    (lease,) = await store.claim("w1")
    await store.finish(lease, Outcome(failure="infrastructure"))
    await store.close()
    store = open_store(path)
    assert names_of(await store.claim("w1")) == ["a"]
    await store.close()


# --- how rollouts end


@pytest.mark.parametrize("failure", ["infrastructure", "timeout"])
async def test_what_is_not_the_agents_fault_is_retried_until_no_attempt_is_left(store, failure):
    await store.enqueue([rollout("a", attempts=2)])
    (first,) = await store.claim("w1")
    assert await store.finish(first, Outcome(failure=failure, error="lost")) == "queued"
    assert await store.results(["a"]) == []
    (second,) = await store.claim("w1")
    assert await store.finish(second, Outcome(failure=failure, error="again")) == "failed"
    (result,) = await store.results(["a"])
    assert (result.attempt, result.outcome.error) == (2, "again")
    assert await store.claim("w1") == []


async def test_a_lease_that_expires_at_the_last_attempt_fails_the_rollout(store):
    await store.enqueue([rollout("a", attempts=1)])
    await store.claim("w1")
    await store.expire_leases(now=FAR_AHEAD)
    assert await store.wait_finished(["a"], timeout_s=0) == ["a"]
    (result,) = await store.results(["a"])
    assert result.outcome.failure == "infrastructure"


async def test_a_failure_of_the_agent_is_not_retried(store):
    (lease,) = await claimed(store, "a")
    assert await store.finish(lease, Outcome(failure="agent", error="KeyError")) == "failed"
    assert await store.claim("w1") == []


async def test_a_retried_rollout_keeps_its_place_in_the_queue(store):
    await store.enqueue([rollout("a"), rollout("b")])
    (lease,) = await store.claim("w1")
    await store.finish(lease, Outcome(failure="infrastructure"))
    assert names_of(await store.claim("w1", limit=2)) == ["a", "b"]


async def test_cancelling_ends_what_is_queued_and_what_runs_but_not_what_is_finished(store):
    done, running = await claimed(store, "done", "running")
    await store.finish(done, DONE)
    await store.enqueue([rollout("queued")])
    assert await store.cancel(["done", "running", "queued", "unknown"]) == 2
    assert await store.cancel(["running"]) == 0
    with pytest.raises(LeaseLost):
        await store.finish(running, DONE)
    results = await store.results(["queued", "running", "done"])
    assert [(r.attempt, r.outcome.failure) for r in results] == [
        (0, "cancelled"),
        (1, "cancelled"),
        (1, None),
    ]


async def test_a_runner_may_report_that_it_cancelled_an_attempt(store):
    (lease,) = await claimed(store, "a")
    assert await store.finish(lease, Outcome(failure="cancelled", log="Ctrl-C")) == "cancelled"
    (result,) = await store.results(["a"])
    assert result.outcome.log == "Ctrl-C"


async def test_a_rollout_cancelled_between_attempts_is_cancelled_not_failed(store):
    (lease,) = await claimed(store, "a")
    await store.finish(lease, Outcome(failure="infrastructure"))
    await store.cancel(["a"])
    assert [r.outcome.failure for r in await store.results(["a"])] == ["cancelled"]


async def test_waiting_for_rollouts_ends_with_the_first_that_finishes(store):
    a, b = await claimed(store, "a", "b")
    waiting = asyncio.create_task(store.wait_finished(["b", "a"], timeout_s=WAIT_S))
    await reached(store)
    await store.finish(a, DONE)
    assert await waiting == ["a"]
    await store.finish(b, DONE)
    assert await store.wait_finished(["b", "a"]) == ["b", "a"]


async def test_waiting_for_rollouts_gives_up_when_the_time_is_over(store):
    await claimed(store, "a")
    assert await store.wait_finished(["a"], timeout_s=0.01) == []
    assert await store.wait_finished(["a"], timeout_s=0) == []
    assert await store.wait_finished([]) == []


# --- what is recorded


async def test_tokens_and_log_probabilities_come_back_bit_for_bit(store):
    (lease,) = await claimed(store, "a")
    computed = np.array([-0.1, -17.03, -1e-45, -np.inf, 0.0], dtype=np.float32)
    sent = Call(
        id="c1",
        rollout_id="a",
        attempt=1,
        index=0,
        parent="c0",
        protocol="anthropic",
        prompt_ids=(0, 2**31 - 1),
        completion_ids=(1, 2, 3, 4, 5),
        logprobs=tuple(computed.tolist()),
        versions=(VersionSpan(start=0, version=3), VersionSpan(start=4, version=4)),
        temperature=0.7,
        top_p=0.95,
        finish_reason="length",
        policy="writer",
        grammar='start: "é"',
        superseded=True,
        drift="history was edited",
        request={"big": 10**30, "inf": float("inf"), "text": "\ud800 é"},
        response=None,
        started=1.5,
        ended=2.5,
    )
    await store.record_calls([sent])
    await store.finish(lease, DONE)
    (result,) = await store.results(["a"])
    assert result.calls == (sent,)
    back = np.array(result.calls[0].logprobs, dtype=np.float32)
    assert back.tobytes() == computed.tobytes()


async def test_calls_come_back_by_index_and_choice_whatever_order_they_came_in(store):
    (lease,) = await claimed(store, "a")
    await store.record_calls([call(lease, 10), call(lease, 2, choice=1)])
    await store.record_calls([call(lease, 2), call(lease, 10)])
    await store.finish(lease, DONE)
    (result,) = await store.results(["a"])
    assert [(c.index, c.choice) for c in result.calls] == [(2, 0), (2, 1), (10, 0)]


async def test_a_superseded_call_keeps_all_its_choices_and_says_so(store):
    (lease,) = await claimed(store, "a")
    await store.record_calls([call(lease, 0), call(lease, 1), call(lease, 1, choice=1)])
    await store.supersede_calls("a", lease.attempt, ["chatcmpl-1", "unknown"])
    await store.supersede_calls("a", lease.attempt + 1, ["chatcmpl-0"])
    await store.finish(lease, DONE)
    (result,) = await store.results(["a"])
    assert [(c.index, c.choice, c.superseded) for c in result.calls] == [
        (0, 0, False),
        (1, 0, True),
        (1, 1, True),
    ]


async def test_what_an_agent_returned_comes_back_as_it_was(store):
    (lease,) = await claimed(store, "a")
    output = {"x": [10**30, float("inf"), "\ud800", None]}
    await store.finish(lease, Outcome(output=output))
    assert [r.outcome.output for r in await store.results(["a"])] == [output]


async def test_an_output_that_is_no_json_is_refused_and_the_attempt_goes_on(store):
    (lease,) = await claimed(store, "a")
    with pytest.raises(DataError, match="outcome of rollout a, attempt 1"):
        await store.finish(lease, Outcome(output=object()))
    assert await store.finish(lease, DONE) == "succeeded"


async def test_results_come_in_the_order_asked_without_those_that_are_not_finished(store):
    await finished(store, "a", "b")
    await store.enqueue([rollout("c")])
    results = await store.results(["b", "c", "unknown", "a"])
    assert [r.rollout.id for r in results] == ["b", "a"]


async def test_a_reward_replaces_the_one_of_the_same_name_source_and_target(store):
    await finished(store, "a")
    first = Reward(rollout_id="a", attempt=1, value=0.5, source="grader")
    of_call = Reward(rollout_id="a", attempt=1, value=0.1, source="rule", call_id="c1")
    await store.add_rewards([first, of_call])
    await store.add_rewards([Reward(rollout_id="a", attempt=1, value=1.0, source="grader")])
    (result,) = await store.results(["a"])
    assert {(r.source, r.call_id, r.value) for r in result.rewards} == {
        ("grader", None, 1.0),
        ("rule", "c1", 0.1),
    }


async def test_rewards_for_no_attempt_or_an_old_one_or_of_no_number_are_refused(store):
    (lease,) = await claimed(store, "a")
    await store.finish(lease, Outcome(failure="infrastructure"))
    (lease,) = await store.claim("w1")
    good = Reward(rollout_id="a", attempt=2, value=1.0, source="agent")
    for attempt, value, error in (
        (1, 1.0, LeaseLost),
        (3, 1.0, StoreError),
        (0, 1.0, StoreError),
        (2, float("nan"), DataError),
    ):
        bad = Reward(rollout_id="a", attempt=attempt, value=value, source="agent", name="bad")
        with pytest.raises(error):
            await store.add_rewards([good, bad])
    await store.finish(lease, DONE)
    assert [r.rewards for r in await store.results(["a"])] == [()]


# --- steps


async def test_a_step_comes_back_as_it_was_committed(store):
    await finished(store, "a", "b")
    metrics = {"loss": 0.5, "reward/mean": float("inf")}
    record = StepRecord(step=0, version=1, consumed=("b", "a"), metrics=metrics, checkpoint="c/1")
    await store.commit_step(record)
    assert await store.steps() == [record]


async def test_a_checkpoint_can_be_added_to_a_committed_step_and_to_no_other(store):
    await store.commit_step(step_record(1))
    await store.add_checkpoint(1, "checkpoints/step-000001")
    (record,) = await store.steps()
    assert record.checkpoint == "checkpoints/step-000001"
    with pytest.raises(StoreError, match="step 2 was never committed"):
        await store.add_checkpoint(2, "checkpoints/step-000002")


async def test_a_metric_that_is_no_number_does_not_make_the_steps_unreadable(store):
    await store.commit_step(StepRecord(step=1, version=1, consumed=(), metrics={"x": np.nan}))
    (record,) = await store.steps()
    assert np.isnan(record.metrics["x"])


async def test_a_rollout_is_consumed_by_one_step_only(store):
    await finished(store, "a", "b")
    await store.commit_step(step_record(1, "a"))
    with pytest.raises(StoreError, match="rollout a was consumed by step 1"):
        await store.commit_step(step_record(2, "b", "a"))
    assert await store.steps() == [step_record(1, "a")]
    await store.commit_step(step_record(2, "b"))


async def test_a_step_that_is_committed_again_with_the_same_record_changes_nothing(store):
    await finished(store, "a", "b")
    await store.commit_step(step_record(1, "a"))
    await store.commit_step(step_record(1, "a"))
    with pytest.raises(StoreError, match="step 1 was committed before"):
        await store.commit_step(step_record(1, "b"))
    assert await store.steps() == [step_record(1, "a")]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (step_record(1, "a"), "step 1 was committed before"),
        (step_record(2, "queued"), "rollout queued, which is queued"),
        (step_record(2, "nowhere"), "rollout nowhere, which is not in the store"),
        (step_record(2, "a", "a"), "twice"),
    ],
)
async def test_a_step_that_cannot_be_is_refused_and_leaves_no_trace(store, record, why):
    await finished(store, "a")
    await store.enqueue([rollout("queued")])
    await store.commit_step(step_record(1))
    with pytest.raises(StoreError, match=why):
        await store.commit_step(record)
    assert await store.steps() == [step_record(1)]
    await store.commit_step(step_record(2, "a"))


async def test_discarding_forgets_later_steps_and_asks_their_rollouts_again(store):
    await store.enqueue([rollout("a", step=1), rollout("b", step=2), rollout("c", step=3)])
    for lease in await store.claim("w1", limit=2):
        await store.record_calls([call(lease, 0)])
        await store.finish(lease, DONE)
    await store.commit_step(step_record(1, "a"))
    await store.commit_step(step_record(2, "b"))
    assert await store.discard_after(1) == 2
    assert await store.steps() == [step_record(1, "a")]
    assert [r.rollout.id for r in await store.results(["a", "b", "c"])] == ["a"]
    assert await store.enqueue([rollout("b", step=2)]) == 1
    (lease,) = await store.claim("w1")
    await store.finish(lease, DONE)
    assert [r.calls for r in await store.results(["b"])] == [()]
    await store.commit_step(step_record(2, "b"))


async def test_discarding_keeps_rollouts_that_a_remaining_step_consumed(store):
    await store.enqueue([rollout("ahead", step=2)])
    (lease,) = await store.claim("w1")
    await store.finish(lease, DONE)
    await store.commit_step(step_record(1, "ahead"))
    assert await store.discard_after(1) == 0


async def test_a_worker_from_before_a_discard_cannot_write_into_the_repeated_rollout(store):
    await store.enqueue([rollout("a", attempts=2)])
    (old,) = await store.claim("w1")
    await store.discard_after(0)
    await store.enqueue([rollout("a", attempts=2)])
    (new,) = await store.claim("w2")
    assert new.attempt > old.attempt
    await store.record_calls([call(old, 0)])
    with pytest.raises(LeaseLost):
        await store.finish(old, DONE)
    assert (await store.counts())["refused_calls"] == 1
    # The forgotten attempt is not held against the repeated rollout.
    assert await store.finish(new, Outcome(failure="infrastructure")) == "queued"
    (last,) = await store.claim("w2")
    assert await store.finish(last, Outcome(failure="infrastructure")) == "failed"


async def test_a_reward_from_before_a_discard_is_refused_as_late(store):
    (old,) = await claimed(store, "a")
    late = Reward(rollout_id="a", attempt=old.attempt, value=1.0, source="agent", name="late")
    await store.discard_after(0)
    with pytest.raises(LeaseLost):
        await store.add_rewards([late])
    (new,) = await claimed(store, "a")
    with pytest.raises(LeaseLost):
        await store.add_rewards([late])
    await store.finish(new, DONE)
    assert [r.rewards for r in await store.results(["a"])] == [()]


# --- retention


async def told(store: SqlStore, *asked: Rollout) -> None:
    """Have these rollouts finished, each with a call, a span and a reward."""
    await store.enqueue(asked)
    for lease in await store.claim("w1", limit=len(asked)):
        of = {"rollout_id": lease.rollout.id, "attempt": lease.attempt}
        await store.record_calls([call(lease, 0)])
        await store.record_spans([Span(id="s1", name="tool", **of)])
        await store.add_rewards([Reward(**of, value=0.5, source="grader")])
        await store.finish(lease, DONE)


async def bulk(store: SqlStore, *names: str) -> list[tuple[int, int]]:
    """How many calls and spans each has."""
    return [(len(one.calls), len(one.spans)) for one in await store.results(names)]


async def test_calls_and_spans_of_consumed_rollouts_are_forgotten_step_by_step(store):
    names = [f"{step}-{n}" for step in (1, 2, 3) for n in range(2)]
    await told(store, *(rollout(name, step=int(name[0])) for name in names))
    for step in (1, 2, 3):
        await store.commit_step(step_record(step, f"{step}-0", f"{step}-1"))
    assert await store.forget("train", 0, 2) == 4
    assert await bulk(store, *names) == [(0, 0)] * 4 + [(1, 1)] * 2
    assert await store.forget("train", 0, 2) == 0, "what is forgotten is not counted twice"


async def test_what_was_forgotten_leaves_outcome_reward_and_consumption(store):
    await told(store, rollout("a"))
    await store.commit_step(step_record(1, "a"))
    (before,) = await store.results(["a"])
    await store.forget("train", 1, 1)
    assert await store.results(["a"]) == [structs.replace(before, calls=(), spans=())]
    with pytest.raises(StoreError, match="consumed by step 1"):
        await store.commit_step(step_record(2, "a"))
    assert await store.enqueue([rollout("a")]) == 0
    assert (await store.counts())["succeeded"] == 1


async def test_only_what_is_finished_and_used_is_forgotten(store):
    evaluation = structs.replace(rollout("e"), split="eval")
    await told(store, rollout("unused"), evaluation)
    (running,) = await claimed(store, "running")
    await store.record_calls([call(running, 0)])
    await store.commit_step(step_record(1))
    assert await store.forget("train", 0, 9) == 0
    assert await store.forget("eval", 0, 9) == 1
    await store.finish(running, DONE)
    assert await bulk(store, "unused", "e", "running") == [(1, 1), (0, 0), (1, 0)]


async def test_more_rollouts_than_one_transaction_takes_are_forgotten_together(store):
    names = [f"r{n}" for n in range(1100)]
    leases = await claimed(store, *names)
    await store.record_calls([call(lease, 0) for lease in leases])
    await asyncio.gather(*(store.finish(lease, DONE) for lease in leases))
    await store.commit_step(step_record(1, *names))
    assert await store.forget("train", 1, 1) == 1100
    assert set(await bulk(store, *names)) == {(0, 0)}


# --- the writer


async def test_a_change_that_is_refused_spoils_none_of_those_written_with_it(own_store):
    x, stale, good = await claimed(own_store, "x", "stale", "good")
    await own_store.cancel(["stale"])
    hold = Hold(own_store)
    held = asyncio.create_task(own_store.finish(x, DONE))
    await hold.reached()
    together = [
        asyncio.create_task(change)
        for change in (
            own_store.enqueue([rollout("new")]),
            own_store.finish(stale, DONE),
            own_store.commit_step(step_record(1, "unknown")),
            own_store.finish(good, DONE),
        )
    ]
    await asyncio.sleep(0)
    hold.release(2)
    await held
    new, late, step, done = await asyncio.gather(*together, return_exceptions=True)
    assert (new, done) == (1, "succeeded")
    assert isinstance(late, LeaseLost)
    assert isinstance(step, StoreError)
    assert names_of(await own_store.claim("w1")) == ["new"]
    assert await own_store.steps() == []


async def in_one_batch(
    store: SqlStore, before: Lease, *work: Coroutine[Any, Any, Any]
) -> list[Any]:
    """What becomes of changes that all wait when the writer has finished `before`."""
    hold = Hold(store)
    held = asyncio.create_task(store.finish(before, DONE))
    await hold.reached()
    together = [asyncio.create_task(one) for one in work]
    await asyncio.sleep(0)
    hold.release(1 + len(together))
    await held
    return await asyncio.gather(*together, return_exceptions=True)


async def test_claims_of_a_crowd_are_served_in_turn_and_a_bad_one_hurts_no_other(own_store):
    (before,) = await claimed(own_store, "x")
    await own_store.enqueue([rollout(name) for name in "bcd"])
    workers = [("w1", 1), ("no text: \ud800", 1), ("w2", 2), ("w3", 5), ("w4", 1)]
    claims = [own_store.claim(worker, limit=limit) for worker, limit in workers]
    one, bad, two, three, four = await in_one_batch(own_store, before, *claims)
    assert isinstance(bad, StoreError)
    assert [names_of(leases) for leases in (one, two, three, four)] == [["b"], ["c", "d"], [], []]
    assert {x.worker for x in two} == {"w2"}


async def test_of_results_told_at_once_for_one_attempt_the_first_counts(own_store):
    x, a, b = await claimed(own_store, "x", "a", "b")
    other = Outcome(output="another answer")
    first, again, late, beside = await in_one_batch(
        own_store,
        x,
        own_store.finish(a, DONE),
        own_store.finish(a, DONE),
        own_store.finish(a, other),
        own_store.finish(b, other),
    )
    assert (first, again, beside) == ("succeeded", "succeeded", "succeeded")
    assert isinstance(late, LeaseLost)
    assert (await own_store.counts())["refused_results"] == 1
    assert [r.outcome for r in await own_store.results(["a", "b"])] == [DONE, other]


async def test_in_a_batch_no_span_overtakes_the_end_of_its_attempt(own_store):
    x, a, b, c = await claimed(own_store, "x", "a", "b", "c")
    in_time = [
        Span(id="in time", rollout_id=x.rollout.id, attempt=1, name="tool") for x in (a, b, c)
    ]
    late = structs.replace(in_time[0], id="late")
    await in_one_batch(
        own_store,
        x,
        own_store.record_spans([in_time[0]]),
        own_store.finish(a, DONE),
        own_store.record_spans([in_time[1]]),
        own_store.record_spans([late, in_time[2]]),
        own_store.finish(b, DONE),
        own_store.finish(c, DONE),
    )
    results = await own_store.results(["a", "b", "c"])
    assert [[one.id for one in r.spans] for r in results] == [["in time"]] * 3
    assert (await own_store.counts())["refused_spans"] == 1


async def test_a_claim_that_comes_with_the_rollout_does_not_overtake_one_that_waits(own_store):
    (lease,) = await claimed(own_store, "x")
    waiting = asyncio.create_task(own_store.claim("w1", wait_s=WAIT_S))
    await reached(own_store)
    hold = Hold(own_store)
    held = asyncio.create_task(own_store.finish(lease, DONE))
    await hold.reached()
    new = asyncio.create_task(own_store.enqueue([rollout("a")]))
    await asyncio.sleep(0)
    late = asyncio.create_task(own_store.claim("w2", wait_s=WAIT_S))
    await asyncio.sleep(0)
    hold.release()
    await asyncio.gather(held, new)
    assert [x.worker for x in await waiting] == ["w1"]
    await own_store.enqueue([rollout("b")])
    assert [x.worker for x in await late] == ["w2"]


async def test_calls_that_cannot_be_kept_stop_the_store_instead_of_being_forgotten(place):
    store = open_store(place)
    (lease,) = await claimed(store, "a")
    await store.record_calls([call(lease, 2**63)])
    for later in (store.finish(lease, DONE), store.enqueue([rollout("b")]), store.close()):
        with pytest.raises(StoreError, match=r"OverflowError|out of range"):
            await later


async def test_whoever_brings_more_than_may_wait_waits(own_store):
    (lease,) = await claimed(own_store, "a")
    hold = Hold(own_store)
    held = asyncio.create_task(own_store.finish(lease, DONE))
    await hold.reached()
    for _ in range(CAPACITY):
        await own_store.record_spans([])
    one_more = asyncio.create_task(own_store.record_spans([]))
    done, _ = await asyncio.wait({one_more}, timeout=0.05)
    assert not done
    hold.release()
    await one_more
    await held


async def test_a_listener_that_raises_does_not_make_a_result_look_lost(own_store, caplog):
    (lease,) = await claimed(own_store, "a")

    def broken(name: str, attempt: int) -> None:
        raise ValueError(f"{name} {attempt}")

    own_store.on_attempt_end(broken)
    assert await own_store.finish(lease, DONE) == "succeeded"
    assert "ValueError: a 1" in caplog.text


async def test_a_closed_store_wakes_those_who_wait_and_refuses_what_comes(place):
    store = open_store(place)
    waiting = [
        asyncio.create_task(store.claim("w1", wait_s=WAIT_S)),
        asyncio.create_task(store.wait_finished(["a"])),
    ]
    await reached(store)
    await store.close()
    for task in (*waiting, store.enqueue([rollout("a")]), store.counts()):
        with pytest.raises(StoreError, match="the store is closed"):
            await task
    await store.close()


# --- what outlives the process


async def test_a_store_that_was_closed_and_opened_again_has_everything(place):
    store = open_store(place)
    leases = await finished(store, "a", "b")
    await store.record_calls([])
    await store.add_rewards([Reward(rollout_id="a", attempt=1, value=1.0, source="grader")])
    await store.commit_step(step_record(1, "a"))
    await store.enqueue([rollout("c")])
    before = (await store.results(["a", "b"]), await store.steps(), await store.counts())
    secret = store.secret
    await store.close()
    store = open_store(place)
    assert (await store.results(["a", "b"]), await store.steps(), await store.counts()) == before
    assert read_key(leases[0].key, store.secret).rollout_id == "a"
    assert store.secret == secret
    assert names_of(await store.claim("w1")) == ["c"]
    await store.close()


CRASH = """
import asyncio, os, sys
sys.path[:0] = sys.argv[2:]
from test_store import DONE, call, claimed
from fulmen.store.open import open_store

async def main():
    store = open_store(sys.argv[1])
    leases = await claimed(store, *(f"r{i}" for i in range(20)))
    for lease in leases:
        await store.record_calls([call(lease, 0), call(lease, 1)])
        await store.finish(lease, DONE)
    os._exit(7)

asyncio.run(main())
"""


async def test_nothing_that_was_answered_is_lost_when_the_process_ends_abruptly(place):
    ended = subprocess.run(
        [sys.executable, "-c", CRASH, str(place), *map(str, Path(__file__).parents[:2])],
        check=False,
    )
    assert ended.returncode == 7
    store = open_store(place)
    results = await store.results([f"r{i}" for i in range(20)])
    assert [len(result.calls) for result in results] == [2] * 20
    await store.close()


@pytest.mark.parametrize(("found", "words"), [(999, "a newer Fulmen"), (2, "an older Fulmen")])
async def test_a_store_of_another_format_is_not_opened(place, found, words):
    await open_store(place).close()
    state(place, f"UPDATE meta SET value = '{found}' WHERE name = 'format'")
    with pytest.raises(StoreError, match=rf"written by {words} \(store format {found},"):
        open_store(place)


async def test_a_store_that_must_be_new_or_be_there_is_refused_when_it_is_not(place):
    with pytest.raises(StoreError, match=r"there is no store|cannot be opened"):
        open_store(place, new=False)
    store = open_store(place, new=True)
    await store.close()
    store = open_store(place, new=True)
    await store.enqueue([rollout("a")])
    await store.close()
    with pytest.raises(StoreError, match="it holds a run already"):
        open_store(place, new=True)
    await open_store(place, new=False).close()


async def test_a_file_that_is_no_store_is_left_alone(path, tmp_path):
    path.write_text("once upon a time " * 99)
    with pytest.raises(StoreError, match="not a Fulmen store"):
        open_store(path)
    assert path.read_text() == "once upon a time " * 99
    other = tmp_path / "other.db"
    file = sqlite3.connect(other)
    file.execute("CREATE TABLE songs (name TEXT)")
    file.close()
    with pytest.raises(StoreError, match="not a Fulmen store"):
        open_store(other)
    with pytest.raises(StoreError, match="No such file or directory"):
        open_store(tmp_path / "missing" / "run.db")


async def test_the_file_holds_the_secret_and_so_is_for_its_owner_only(path):
    store = open_store(path)
    await store.enqueue([rollout("a")])
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert modes == {"run.db": 0o600, "run.db-wal": 0o600, "run.db-shm": 0o600}
    await store.close()


async def test_a_secret_that_is_given_is_used_and_not_kept(place):
    await open_store(place, secret=b"from the operator").close()
    assert state(place, "SELECT name FROM meta") == [("format",)]
    store = open_store(place, secret=b"from the operator")
    (lease,) = await claimed(store, "a")
    await store.close()
    store = open_store(place)
    with pytest.raises(KeyRefused):
        read_key(lease.key, store.secret)
    await store.close()


# --- a full disk, by SQLite's own bound on the pages of a file


@pytest.fixture
def full_disk(path: Path) -> Iterator[Callable[[], None]]:
    """Every store opened from here on finds the disk full, until this is called."""
    connections: list[sqlite3.Connection] = []

    def fill(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # as many as there are, no more
        connections.append(connection)

    def free() -> None:
        for connection in connections:
            with contextlib.suppress(sqlite3.ProgrammingError):  # closed
                connection.execute("PRAGMA max_page_count = 1000000")

    asyncio.run(open_store(path).close())
    event.listen(Engine, "connect", fill)
    yield free
    event.remove(Engine, "connect", fill)


FULL = r"run\.db: no space left on device; free some space and resume"


def test_a_full_disk_is_reported_and_writing_goes_on_when_there_is_room(path, full_disk):
    async def scenario() -> None:
        store = open_store(path)
        many = [rollout(f"r{i}") for i in range(1000)]
        with pytest.raises(StoreError, match=FULL):
            await store.enqueue(many)
        assert (await store.counts())["queued"] == 0
        full_disk()
        assert await store.enqueue(many) == 1000
        await store.close()

    asyncio.run(scenario())


def test_calls_lost_to_a_full_disk_stop_the_store_instead_of_a_result_without_them(path, full_disk):
    async def scenario() -> None:
        store = open_store(path)
        (lease,) = await claimed(store, "a")
        for index in range(200):
            with contextlib.suppress(StoreError):
                await store.record_calls([call(lease, index)])
        with pytest.raises(StoreError, match=FULL):
            await store.finish(lease, DONE)
        full_disk()
        for later in (store.finish(lease, DONE), store.counts(), store.wait_finished(["a"])):
            with pytest.raises(StoreError, match=FULL):
                await later
        with pytest.raises(StoreError, match=FULL):
            await store.close()
        store = open_store(path)
        counts = await store.counts()
        assert (counts["running"], counts["succeeded"]) == (1, 0)
        await store.close()

    asyncio.run(scenario())
