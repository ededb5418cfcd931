"""Work on its way to the writer, and which of it can be done together.

A thousand workers that finish, claim and report at the same time bring a thousand small pieces of
work of three or four kinds. Done one by one, each costs its own statements; done by kind, a batch
costs hardly more than a single one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection

from fulmen.store.database import Change

A = TypeVar("A")
T = TypeVar("T")

Work = Callable[[Connection], Change[T]]
Way = Callable[[Connection, Sequence[A]], Sequence[Change[T]]]
"""How items of one kind are done at once, as if one after another: a change for each, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Alike(Generic[A, T]):
    """Work on one item, in a way that does many at once."""

    way: Way[A, T]
    item: A

    def __call__(self, connection: Connection) -> Change[T]:
        """Do this one alone."""
        return self.way(connection, [self.item])[0]


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[T]):
    """A piece of work, and who waits for it."""

    work: Work[T]
    future: "Future[T]" = field(default_factory=Future)
    touches: frozenset[str] = frozenset()
    """Ids of the rollouts that it changes: no other work on them is overtaken, and they are held
    from the beginning of its transaction on."""
    promised: bool = False
    """The caller does not wait; losing the work stops the writer."""
    parks: bool = False
    """A falsy value means "nothing yet": run again once rollouts have been queued."""
    unwanted: Callable[[T], None] = lambda _: None
    """Called with the value if the caller stopped waiting while it was produced."""


def do(connection: Connection, jobs: Sequence[Job[Any]]) -> Sequence[Change[Any]]:
    """Do one job, or a group that `grouped` made; a change for each."""
    work = jobs[0].work
    if isinstance(work, Alike):
        alike = [job.work for job in jobs if isinstance(job.work, Alike)]  # all of them
        return work.way(connection, [one.item for one in alike])
    return [work(connection)]


@dataclass(slots=True)
class _Group:
    place: int
    jobs: list[Job[Any]]
    later: set[str] = field(default_factory=set)
    """Rollouts that groups after this one touch."""


def grouped(jobs: Sequence[Job[Any]]) -> list[list[Job[Any]]]:
    """The jobs in groups to be done at once, in an order that no rollout can tell from theirs.

    A job joins the last group of its kind, unless it would overtake work on the same rollouts, or
    work of no kind, which may touch anything.
    """
    groups: list[_Group] = []
    open_: dict[Any, _Group] = {}
    for job in jobs:
        work = job.work
        if not isinstance(work, Alike):
            groups.append(_Group(len(groups), [job]))
            open_.clear()
            continue
        group = open_.get(work.way)
        if group is None or not group.later.isdisjoint(job.touches):
            group = open_[work.way] = _Group(len(groups), [])
            groups.append(group)
        group.jobs.append(job)
        for other in open_.values():
            if other.place < group.place:
                other.later |= job.touches
    return [group.jobs for group in groups]
