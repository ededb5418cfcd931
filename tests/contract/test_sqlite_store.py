"""What the store promises, on a real SQLite file."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.schema.errors import LeaseLost, StoreError
from fulmen.schema.keys import read_key
from fulmen.schema.records import (
    Call,
    Outcome,
    Reward,
    Rollout,
    Sampling,
    Span,
    StepRecord,
    Task,
    VersionSpan,
)
from fulmen.store.lifecycle import after
from fulmen.store.open import open_store
from fulmen.store.sqlite import SqliteStore
from fulmen.store.tables import SCHEMA_VERSION


@pytest.fixture
async def store(tmp_path):
    store = open_store(tmp_path / "run.db")
    yield store
    await store.close()


def rollout(name: str, **changes: Any) -> Rollout:
    values: dict[str, Any] = {"task": Task(id="t", input={"q": 1}), "group": "g", "step": 1}
    return Rollout(id=name, **(values | changes))


def call(lease, index=0, **changes: Any) -> Call:
    values: dict[str, Any] = {
        "id": f"{lease.rollout.id}-{lease.attempt}-{index}",
        "rollout_id": lease.rollout.id,
        "attempt": lease.attempt,
        "index": index,
        "protocol": "chat",
        "prompt_ids": (1, 2, 151_645),
        "completion_ids": (3, 4),
        "logprobs": (-0.5, -1.25),
        "versions": (VersionSpan(start=0, version=3),),
        "temperature": 1.0,
        "top_p": 1.0,
        "finish_reason": "stop",
        "request": {"messages": [{"role": "user", "content": "1+1?"}]},
        "response": {"role": "assistant", "content": "2"},
    }
    return Call(**(values | changes))


async def claim_one(store: SqliteStore, worker="w"):
    (lease,) = await store.claim(worker)
    return lease


async def test_rollouts_are_claimed_in_the_order_they_were_queued(store):
    assert await store.enqueue([rollout(name) for name in "cab"]) == 3
    leases = await store.claim("w", limit=2)
    assert [lease.rollout.id for lease in leases] == ["c", "a"]
    assert [lease.attempt for lease in leases] == [1, 1]
    assert (await claim_one(store)).rollout == rollout("b")
    assert await store.claim("w") == []


async def test_queueing_the_same_rollout_again_changes_nothing(store):
    await store.enqueue([rollout("a")])
    lease = await claim_one(store)
    await store.finish(lease, Outcome(output="x"))
    assert await store.enqueue([rollout("a"), rollout("b")]) == 1
    assert (await claim_one(store)).rollout.id == "b"
    assert (await store.counts())["succeeded"] == 1


async def test_a_waiting_worker_is_woken_by_what_is_queued_later(store):
    waiting = asyncio.ensure_future(store.claim("w", wait_s=30))
    await asyncio.sleep(0)
    started = time.monotonic()
    await store.enqueue([rollout("a")])
    (lease,) = await waiting
    assert lease.rollout.id == "a"
    assert time.monotonic() - started < 5, "woken by the commit, not by the end of its patience"


async def test_a_worker_that_waits_in_vain_gets_nothing(store):
    assert await store.claim("w", wait_s=0.01) == []


def test_workers_on_different_loops_never_get_the_same_rollout(tmp_path):
    store = open_store(tmp_path / "run.db")
    asyncio.run(store.enqueue([rollout(f"{n:03d}") for n in range(60)]))
    taken: list[str] = []

    async def work():
        while leases := await store.claim("w", limit=2):
            taken.extend(lease.rollout.id for lease in leases)

    threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(store.close())
    assert sorted(taken) == [f"{n:03d}" for n in range(60)]


async def test_the_lease_s_key_states_what_the_gateway_must_know(store):
    sampling = Sampling(temperature=0.5)
    await store.enqueue([rollout("a", seed=7, sampling=sampling, split="eval")])
    lease = await claim_one(store)
    claims = read_key(lease.key, store.secret)
    assert (claims.rollout_id, claims.attempt, claims.seed) == ("a", 1, 7)
    assert claims.sampling == sampling
    assert not claims.trained
    assert claims.expires > time.time() + lease.rollout.deadline_s


async def test_a_finished_rollout_comes_back_with_everything_exactly(store):
    await store.enqueue([rollout("a")])
    lease = await claim_one(store)
    logprobs = tuple(float.fromhex(x) for x in ("-0x1.99999ap-4", "-0x1.5p+3"))
    second = call(lease, 1, parent="a-1-0", drift="edited", logprobs=logprobs)
    await store.record_calls([second, call(lease, 0)])
    outcome = Outcome(output={"answer": [1, "ä"]}, log="said")
    assert await store.finish(lease, outcome) == "succeeded"
    reward = Reward(rollout_id="a", attempt=1, value=0.5, source="grader")
    await store.add_rewards([reward])
    (result,) = await store.results(["missing", "a"])
    assert result.rollout == rollout("a")
    assert result.outcome == outcome
    assert result.calls == (call(lease, 0), second)
    assert result.rewards == (reward,)


async def test_token_arrays_are_binary_at_rest(store, tmp_path):
    await store.enqueue([rollout("a")])
    lease = await claim_one(store)
    await store.record_calls([call(lease)])
    await store.finish(lease, Outcome())
    with sqlite3.connect(tmp_path / "run.db") as db:
        ((ids, record),) = db.execute("select prompt_ids, record from calls")
    db.close()
    assert ids == (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + (151_645).to_bytes(
        4, "little"
    )
    assert b"151645" not in record


async def test_a_reward_given_again_replaces_the_first(store):
    await store.enqueue([rollout("a")])
    await store.finish(await claim_one(store), Outcome())
    for value in (0.1, 0.9):
        await store.add_rewards([Reward(rollout_id="a", attempt=1, value=value, source="agent")])
    (result,) = await store.results(["a"])
    assert [reward.value for reward in result.rewards] == [0.9]


@pytest.mark.parametrize("failure", ["infrastructure", "timeout"])
async def test_a_failure_of_the_infrastructure_is_tried_again_until_attempts_run_out(
    store, failure
):
    await store.enqueue([rollout("a", max_attempts=2)])
    first = await claim_one(store)
    await store.record_calls([call(first)])
    assert await store.finish(first, Outcome(failure=failure)) == "queued"
    second = await claim_one(store)
    assert (second.rollout.id, second.attempt) == ("a", 2)
    assert await store.finish(second, Outcome(failure=failure)) == "failed"
    (result,) = await store.results(["a"])
    assert (result.attempt, result.calls) == (2, ()), "only the last attempt's calls count"


async def test_a_failure_of_the_agent_is_final(store):
    await store.enqueue([rollout("a")])
    status = await store.finish(await claim_one(store), Outcome(failure="agent", error="x"))
    assert status == "failed"
    assert await store.claim("w") == []


async def test_a_late_result_of_a_replaced_attempt_is_refused_and_counted(store):
    await store.enqueue([rollout("a")])
    first = await claim_one(store)
    assert await store.expire_leases(now=float("inf")) == ["a"]
    second = await claim_one(store)
    with pytest.raises(LeaseLost, match="rollout a, attempt 1"):
        await store.finish(first, Outcome(output="late"))
    await store.finish(second, Outcome(output="in time"))
    with pytest.raises(LeaseLost):
        await store.finish(second, Outcome(output="twice"))
    (result,) = await store.results(["a"])
    assert result.outcome.output == "in time"
    assert (await store.counts())["refused_results"] == 2


async def test_calls_of_a_replaced_attempt_are_refused_and_counted(store):
    await store.enqueue([rollout("a")])
    first = await claim_one(store)
    await store.expire_leases(now=float("inf"))
    second = await claim_one(store)
    await store.record_calls([call(first), call(second)])
    await store.finish(second, Outcome())
    (result,) = await store.results(["a"])
    assert [c.id for c in result.calls] == ["a-2-0"]
    assert (await store.counts())["refused_calls"] == 1


async def test_a_heartbeat_renews_the_lease_and_names_those_that_are_lost(store):
    await store.enqueue([rollout("a"), rollout("b")])
    a, b = await store.claim("w", limit=2, lease_s=0.0)
    await store.cancel(["b"])
    assert await store.heartbeat([a, b], lease_s=60) == [b]
    assert await store.expire_leases() == []


async def test_cancelling_ends_what_is_not_finished_and_fences_its_attempt(store):
    await store.enqueue([rollout("a"), rollout("b"), rollout("c")])
    done, running = await store.claim("w", limit=2)
    await store.finish(done, Outcome())
    assert await store.cancel(["a", "b", "c", "unknown"]) == 2
    with pytest.raises(LeaseLost):
        await store.finish(running, Outcome())
    results = await store.results(["a", "b", "c"])
    assert [r.outcome.failure for r in results] == [None, "cancelled", "cancelled"]


async def test_those_who_wait_for_an_end_are_woken_by_its_commit(store):
    await store.enqueue([rollout("a"), rollout("b")])
    waiting = asyncio.ensure_future(store.wait_finished(["a", "b"]))
    lease = await claim_one(store)
    assert not waiting.done()
    await store.finish(lease, Outcome())
    assert await waiting == ["a"]
    assert await store.wait_finished(["b"], timeout_s=0.01) == []


async def test_the_end_of_an_attempt_is_told(store):
    ended: list[tuple[str, int]] = []
    store.on_attempt_end(lambda *which: ended.append(which))
    await store.enqueue([rollout("a")])
    await store.finish(await claim_one(store), Outcome(failure="timeout"))
    await store.finish(await claim_one(store), Outcome())
    assert ended == [("a", 1), ("a", 2)]


async def test_a_rollout_is_consumed_by_one_step_only(store):
    await store.enqueue([rollout("a"), rollout("b")])
    step = StepRecord(step=1, version=1, consumed=("a",), metrics={"reward/mean": 0.5})
    await store.commit_step(step)
    with pytest.raises(StoreError, match="step 1 is committed already"):
        await store.commit_step(step)
    with pytest.raises(StoreError, match="rollout a, which step 1 has consumed"):
        await store.commit_step(StepRecord(step=2, version=2, consumed=("b", "a"), metrics={}))
    assert await store.steps() == [step], "the refused step left nothing"
    await store.commit_step(StepRecord(step=2, version=2, consumed=("b",), metrics={}))


async def test_going_back_to_a_step_forgets_what_came_after(store):
    await store.enqueue([rollout("a", step=1), rollout("b", step=2), rollout("c", step=3)])
    for number, name in ((1, "a"), (2, "b")):
        await store.commit_step(
            StepRecord(step=number, version=number, consumed=(name,), metrics={})
        )
    assert await store.discard_after(1) == 2
    assert [step.step for step in await store.steps()] == [1]
    assert await store.enqueue([rollout("b", step=2)]) == 1
    await store.commit_step(StepRecord(step=2, version=2, consumed=("b",), metrics={}))


async def test_a_span_is_updated_when_it_ends(store):
    await store.enqueue([rollout("a")])
    span = Span(id="s", rollout_id="a", attempt=1, name="tool")
    await store.record_spans([span])
    await store.record_spans([Span(id="s", rollout_id="a", attempt=1, name="tool", ended=2.0)])
    await store.close()


async def test_one_refused_change_does_not_spoil_its_neighbours(store):
    await store.enqueue([rollout("a"), rollout("b")])
    a, b = await store.claim("w", limit=2)
    await store.finish(a, Outcome())
    late, good = await asyncio.gather(
        store.finish(a, Outcome()), store.finish(b, Outcome()), return_exceptions=True
    )
    assert isinstance(late, LeaseLost)
    assert good == "succeeded"


_CRASH = """
import asyncio, os, sys
from fulmen.schema.records import Outcome, Rollout, Task
from fulmen.store.open import open_store
async def main():
    store = open_store(sys.argv[1])
    await store.enqueue([Rollout(id=n, task=Task(id="t", input=1), group="g", step=1)
                         for n in ("done", "running", "queued")])
    done, running = await store.claim("w", limit=2)
    await store.finish(done, Outcome(output="kept"))
    os._exit(9)
asyncio.run(main())
"""


async def test_a_process_that_ends_abruptly_loses_nothing_it_was_told_is_done(tmp_path):
    path = tmp_path / "run.db"
    ended = subprocess.run([sys.executable, "-c", _CRASH, str(path)], check=False, env=os.environ)
    assert ended.returncode == 9
    store = open_store(path)
    (result,) = await store.results(["done"])
    assert result.outcome.output == "kept"
    assert await store.expire_leases(now=float("inf")) == ["running"]
    leases = await store.claim("w", limit=9)
    assert [(lease.rollout.id, lease.attempt) for lease in leases] == [
        ("running", 2),
        ("queued", 1),
    ]
    await store.close()


async def test_the_secret_survives_so_that_keys_do(tmp_path):
    first = open_store(tmp_path / "run.db")
    await first.close()
    second = open_store(tmp_path / "run.db")
    assert second.secret == first.secret
    await second.close()


def test_a_store_of_another_version_is_refused_by_both_numbers(tmp_path):
    path = tmp_path / "run.db"
    asyncio.run(open_store(path).close())
    with sqlite3.connect(path) as db:
        db.execute("update meta set value = x'63' where name = 'schema_version'")
    db.close()
    with pytest.raises(
        StoreError, match=rf"newer version .*schema 99, this one reads {SCHEMA_VERSION}"
    ):
        open_store(path)


def test_a_file_that_is_no_store_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to look like one " * 50)
    with pytest.raises(StoreError, match="is not a store of Fulmen"):
        open_store(path)


async def test_a_full_disk_is_said_in_words_and_nothing_is_half_written(tmp_path):
    store = open_store(tmp_path / "run.db")
    await store.enqueue([rollout("a")])
    lease = await claim_one(store)

    def no_more_pages(db) -> None:
        pages = db.exec_driver_sql("PRAGMA page_count").scalar()
        db.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    await asyncio.wrap_future(store._writer.submit(no_more_pages))
    with pytest.raises(StoreError, match=r"run\.db: no space left on device; free some space"):
        await store.finish(lease, Outcome(output="x" * 1_000_000))
    assert (await store.counts()) == {"running": 1}
    await store.close()


async def test_a_closed_store_says_so(tmp_path):
    store = open_store(tmp_path / "run.db")
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.enqueue([rollout("a")])


failures = st.sampled_from([None, "agent", "timeout", "infrastructure", "cancelled"])


@given(failures, st.integers(1, 5), st.integers(1, 5))
def test_only_infrastructure_is_retried_and_only_while_attempts_are_left(failure, attempt, most):
    status = after(Outcome(failure=failure), attempt, most)
    assert (status == "queued") == (failure in ("timeout", "infrastructure") and attempt < most)
    assert (status == "succeeded") == (failure is None)
