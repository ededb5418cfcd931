"""The store against a plain model of the life of rollouts, step by step, by hypothesis."""

import asyncio
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Connection, Update, update

from fulmen.schema.errors import LeaseLost, StoreError
from fulmen.schema.records import FailureKind, Lease, Outcome, Retry, Rollout, StepRecord, Task
from fulmen.store import tables
from fulmen.store.database import Change
from fulmen.store.open import open_store

FAILURES: list[FailureKind | None] = [None, "agent", "timeout", "infrastructure", "cancelled"]
retries = st.builds(
    Retry,
    attempts=st.integers(1, 2),
    on=st.sampled_from([("infrastructure", "timeout"), ("agent",), ()]),
    pause_s=st.sampled_from([0.0, 1000.0]),
    longest_pause_s=st.just(1000.0),
)
TASK = Task(id="t", input="x")
names = st.sampled_from(["a", "b", "c", "d"])


@dataclass
class Life:
    """A rollout as the picture in `fulmen.store.base` draws it."""

    step: int
    retry: Retry
    status: str = "queued"
    begun: int = 0
    rests: bool = False


class StoreAgainstModel(RuleBasedStateMachine):
    @staticmethod
    def place() -> str:
        """Where the next store is made."""
        return ":memory:"

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.store = open_store(self.place())
        self.lives: dict[str, Life] = {}  # in the order of the queue
        self.current: dict[str, Lease] = {}
        self.told: dict[tuple[str, int], tuple[FailureKind | None, str]] = {}
        self.leases: list[Lease] = []  # all that were ever given
        self.consumed: dict[str, int] = {}
        self.steps: list[int] = []
        self.refused = 0

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.store.close())
            self.runner.close()

    def change(self, statement: Update) -> None:
        """Behind the store's back."""

        def work(connection: Connection) -> Change[None]:
            connection.execute(statement)
            return Change(None)

        self.runner.run(self.store._write(work))

    @rule(name=names, step=st.integers(1, 3), retry=retries)
    def enqueue(self, name: str, step: int, retry: Retry) -> None:
        asked = Rollout(id=name, task=TASK, group="g", step=step, retry=retry)
        new = self.runner.run(self.store.enqueue([asked]))
        assert new == (name not in self.lives)
        self.lives.setdefault(name, Life(step, retry))

    @rule(limit=st.integers(1, 3))
    def claim(self, limit: int) -> None:
        leases = self.runner.run(self.store.claim("w", limit=limit))
        lives = self.lives.items()
        queued = [name for name, life in lives if life.status == "queued" and not life.rests]
        assert [lease.rollout.id for lease in leases] == queued[:limit]
        for lease in leases:
            name = lease.rollout.id
            assert all(lease.attempt > x.attempt for x in self.leases if x.rollout.id == name)
            self.lives[name].status = "running"
            self.lives[name].begun += 1
            self.current[name] = lease
        self.leases += leases

    @rule(
        which=st.integers(0, 99),
        failure=st.sampled_from(FAILURES),
    )
    def finish(self, which: int, failure: FailureKind | None) -> None:
        if not self.leases:
            return
        lease = self.leases[which % len(self.leases)]
        name = lease.rollout.id
        try:
            status = self.runner.run(self.store.finish(lease, Outcome(failure=failure)))
        except LeaseLost:
            self.refused += 1
            assert self.current.get(name) is not lease
            assert self.told.get((name, lease.attempt), ("", ""))[0] != failure
            return
        if self.current.get(name) is not lease:
            assert self.told[name, lease.attempt] == (failure, status)
            return
        del self.current[name]
        assert status == self._end(name, failure)
        self.told[name, lease.attempt] = (failure, status)

    def _end(self, name: str, failure: FailureKind | None) -> str:
        life = self.lives[name]
        life.status = {None: "succeeded", "cancelled": "cancelled"}.get(failure, "failed")
        if failure in life.retry.on and life.begun < life.retry.attempts:
            life.status, life.rests = "queued", life.retry.pause_s > 0
        return life.status

    @rule(name=names)
    def rest_is_over(self, name: str) -> None:
        c = tables.rollouts.c
        over = update(tables.rollouts).where(c.id == name, c.not_before.is_not(None))
        self.change(over.values(not_before=tables.now()))
        if name in self.lives:
            self.lives[name].rests = False

    @rule(name=names)
    def deadline_is_over(self, name: str) -> None:
        c = tables.rollouts.c
        over = update(tables.rollouts).where(c.id == name, c.deadline.is_not(None))
        self.change(over.values(deadline=1.0))
        assert self.runner.run(self.store.expire_leases()) == [name] * (name in self.current)
        if self.current.pop(name, None):
            self._end(name, "timeout")

    @rule()
    def expire(self) -> None:
        over = self.runner.run(self.store.expire_leases(now=1e12))
        assert sorted(over) == sorted(self.current)
        for name in over:
            self._end(name, "infrastructure")
        self.current.clear()

    @rule(name=names)
    def cancel(self, name: str) -> None:
        life = self.lives.get(name)
        is_open = life is not None and life.status in ("queued", "running")
        assert self.runner.run(self.store.cancel([name])) == is_open
        if life and is_open:
            life.status, life.rests = "cancelled", False
            self.current.pop(name, None)

    @rule(step=st.integers(1, 3), ids=st.sets(names))
    def commit_step(self, step: int, ids: set[str]) -> None:
        record = StepRecord(step=step, version=1, consumed=tuple(sorted(ids)), metrics={})
        allowed = step not in self.steps and all(
            name not in self.consumed
            and name in self.lives
            and self.lives[name].status in ("succeeded", "failed", "cancelled")
            for name in ids
        )
        try:
            self.runner.run(self.store.commit_step(record))
        except StoreError:
            assert not allowed
            return
        assert allowed
        self.steps.append(step)
        self.consumed |= dict.fromkeys(ids, step)

    @rule(step=st.integers(0, 3))
    def discard_after(self, step: int) -> None:
        self.consumed = {name: at for name, at in self.consumed.items() if at <= step}
        self.steps = [kept for kept in self.steps if kept <= step]
        gone = [n for n, life in self.lives.items() if life.step > step and n not in self.consumed]
        assert self.runner.run(self.store.discard_after(step)) == len(gone)
        for name in gone:
            del self.lives[name]
            self.current.pop(name, None)
        self.told = {at: end for at, end in self.told.items() if at[0] not in gone}

    @invariant()
    def the_store_stands_where_the_model_stands(self) -> None:
        if not hasattr(self, "store"):
            return
        counts = self.runner.run(self.store.counts())
        statuses = [life.status for life in self.lives.values()]
        for status in ("queued", "running", "succeeded", "failed", "cancelled"):
            assert counts[status] == statuses.count(status)
        assert counts["refused_results"] == self.refused
        steps = self.runner.run(self.store.steps())
        assert [record.step for record in steps] == sorted(self.steps)
        assert {n: record.step for record in steps for n in record.consumed} == self.consumed


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True
)


def test_a_store_in_postgresql_stands_where_the_model_stands(postgres):
    class PostgresAgainstModel(StoreAgainstModel):
        place = staticmethod(postgres.url)

    run_state_machine_as_test(
        PostgresAgainstModel,
        settings=settings(
            max_examples=10, stateful_step_count=20, deadline=None, derandomize=True, database=None
        ),
    )
