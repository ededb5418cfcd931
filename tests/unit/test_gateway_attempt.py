"""What an attempt remembers of its requests, who may ask, and how long a request waits."""

import asyncio

import pytest
from msgspec import structs

from fulmen.gateway.attempt import Asked, Attempt, Attempts
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.gate import Gate, patience
from fulmen.schema.errors import LeaseLost
from fulmen.schema.keys import KeyClaims


def asked(name, prompt=b"p"):
    return Asked((name,), (prompt,))


def test_a_prompt_is_counted_each_time_it_comes():
    attempt = Attempt()
    assert [attempt.repeat(b"a"), attempt.repeat(b"b"), attempt.repeat(b"a")] == [0, 0, 1]


def test_a_prompt_whose_answer_was_never_received_does_not_count():
    attempt, first = Attempt(), asked("one", b"a")
    assert attempt.repeat(b"a") == 0
    attempt.lost(first)
    attempt.lost(first)  # it is lost once, however often it is said
    assert [attempt.repeat(b"a"), attempt.repeat(b"a")] == [0, 1]


def test_a_retry_supersedes_the_last_request_with_the_same_body():
    attempt, first, second = Attempt(), asked("one"), asked("two")
    for request in (first, second):
        attempt.repeat(b"p")
        attempt.begin(b"body", request)
    assert attempt.retried(b"body") is second
    assert second.superseded
    assert not first.superseded


def test_a_retry_of_a_request_that_is_known_to_be_lost_supersedes_no_other():
    attempt, first, second = Attempt(), asked("one"), asked("two")
    for request in (first, second):
        attempt.repeat(b"p")
        attempt.begin(b"body", request)
    attempt.lost(first)
    assert attempt.retried(b"body") is None
    assert not second.superseded


def test_a_retry_of_something_that_never_arrived_is_a_first_request():
    assert Attempt().retried(b"body") is None


def test_an_attempt_that_ended_is_forgotten_and_may_not_ask_again():
    attempts, claims = Attempts(), KeyClaims(rollout_id="r", attempt=1, expires=0)
    first = attempts.of(claims)
    assert attempts.of(claims) is first
    attempts.end("r", 1)
    with pytest.raises(LeaseLost, match="attempt 1 of rollout r has ended"):
        attempts.of(claims)
    assert attempts.of(structs.replace(claims, attempt=2)) is not first


async def test_what_an_attempt_is_asking_for_is_cancelled_from_any_thread_when_it_ends():
    attempt, begun = Attempt("attempt 1 of rollout r"), asyncio.Event()

    async def ask() -> None:
        with attempt.asking():
            begun.set()
            await asyncio.Event().wait()

    asking = asyncio.create_task(ask())
    await begun.wait()
    await asyncio.to_thread(attempt.end)
    with pytest.raises(LeaseLost, match="attempt 1 of rollout r has ended"):
        await asking
    with pytest.raises(LeaseLost), attempt.asking():
        pytest.fail("it has ended")


async def test_a_task_that_has_stopped_asking_is_left_alone_when_the_attempt_ends():
    attempt = Attempt()
    with attempt.asking():
        attempt.end()
        assert attempt.ended
    await asyncio.sleep(0)  # what was to cancel this task comes too late


async def test_a_client_that_hangs_up_is_no_end_of_its_attempt():
    attempt, begun = Attempt(), asyncio.Event()

    async def ask() -> None:
        with attempt.asking():
            begun.set()
            await asyncio.Event().wait()

    asking = asyncio.create_task(ask())
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_two_holds_that_overlap_both_hold():
    gate = Gate()
    async with gate.hold():
        async with gate.hold():
            pass
        with pytest.raises(RequestRefused):
            await gate.passed(0)
    await gate.passed(0)


async def test_a_request_that_is_held_passes_when_the_gate_opens():
    gate = Gate()
    async with gate.hold():
        waiting = asyncio.create_task(gate.passed(60))
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_a_request_that_would_wait_too_long_is_told_when_to_come_back():
    gate = Gate()
    async with gate.hold():
        with pytest.raises(RequestRefused) as refused:
            await gate.passed(0)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5)


@pytest.mark.parametrize("text", ["-1", "0", "inf", "nan", "soon", ""])
def test_a_read_timeout_that_is_none_counts_as_a_short_one(text):
    assert patience({"x-stainless-read-timeout": text}) == patience({}) == 45.0
