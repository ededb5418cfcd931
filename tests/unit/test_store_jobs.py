"""Which work the store's writer does at once, and what may not overtake what."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from fulmen.store.database import Change
from fulmen.store.jobs import Alike, Job, grouped


def spans(_: Connection, items: Sequence[str]) -> list[Change[None]]:
    return [Change(None)] * len(items)


def ends(_: Connection, items: Sequence[str]) -> list[Change[None]]:
    return [Change(None)] * len(items)


def claims(_: Connection, items: Sequence[str]) -> list[Change[None]]:
    return [Change(None)] * len(items)


def job(way: Any, item: str, *touches: str) -> Job[None]:
    return Job(Alike(way, item), touches=frozenset(touches))


def told(jobs: Sequence[Job[Any]]) -> list[list[str]]:
    """Groups by their items."""
    return [
        [one.work.item if isinstance(one.work, Alike) else "anything" for one in group]
        for group in grouped(jobs)
    ]


def test_work_of_a_crowd_is_done_once_for_each_kind():
    jobs = [
        job(claims, "claim 1"),
        job(spans, "span a", "a"),
        job(ends, "end b", "b"),
        job(claims, "claim 2"),
        job(spans, "span c", "c"),
        job(ends, "end a", "a"),
        job(spans, "span d", "d"),
        job(ends, "end c", "c"),
    ]
    assert told(jobs) == [
        ["claim 1", "claim 2"],
        ["span a", "span c", "span d"],
        ["end b", "end a", "end c"],
    ]


def test_no_span_overtakes_the_end_of_its_rollout():
    jobs = [
        job(spans, "span a", "a"),
        job(ends, "end a", "a"),
        job(spans, "late span a", "a"),
        job(spans, "span b", "b"),
        job(ends, "end b", "b"),
    ]
    assert told(jobs) == [["span a"], ["end a"], ["late span a", "span b"], ["end b"]]


def test_nothing_overtakes_work_that_may_touch_anything():
    anything: Job[None] = Job(lambda _: Change(None))
    jobs = [job(spans, "span a", "a"), anything, job(spans, "span b", "b")]
    assert told(jobs) == [["span a"], ["anything"], ["span b"]]


def test_no_work_is_no_group():
    assert grouped([]) == []
