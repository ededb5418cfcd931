"""The store of a run on another machine, over HTTP.

With an admin's key it does everything that a store does, with a worker's key what a pool needs.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from fulmen.runner.claiming import ClaimDesk
from fulmen.runner.following import Following
from fulmen.runner.gathering import Gathering
from fulmen.runner.store_link import StoreLink
from fulmen.schema.errors import LeaseLost, StoreError
from fulmen.schema.packing import pack
from fulmen.schema.records import (
    Call,
    Lease,
    Outcome,
    Record,
    Reward,
    Rollout,
    RolloutResult,
    Span,
    Split,
    StepRecord,
)
from fulmen.store import verbs
from fulmen.store.base import Status
from fulmen.store.verbs import Ask, held, read_answer, verb_of

T = TypeVar("T")
PATIENCE_S = 60.0
_WAIT_S = 25.0


class StoreClient:
    """Implements `fulmen.store.base.Store` by asking a server (`fulmen.server.store_api`).

    It belongs to the event loop that uses it first; others may use it as well while that one runs.
    """

    def __init__(self, url: str, key: str, *, patience_s: float = PATIENCE_S) -> None:
        """Nothing is sent yet.

        Args:
            url: of the server, as the run prints it.
            key: the admin's or a worker's.
            patience_s: how long a server that is away is waited for.
        """
        self._link = StoreLink(url, key, patience_s=patience_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gathering = Gathering(lambda body: self._link.post("batch", body))
        self._desk = ClaimDesk(self._claim_late, self._unwanted)
        self._following = Following(self._ends, self._lost)
        self._tasks: set[asyncio.Task[None]] = set()
        self._follows: asyncio.Task[None] | None = None
        self._wants_ends = False
        self._held: dict[tuple[str, int], tuple[Lease, float]] = {}
        """Leases of this client that have not ended yet, as far as it knows; each with how long it
        was asked for, seconds."""
        self._following.add(self._let_go)
        self._closed = False

    def on_attempt_end(self, callback: Callable[[str, int], None]) -> None:
        """Have `callback(rollout_id, attempt)` called, in the client's event loop, soon after an
        attempt may no longer write. It may be called for the same again."""
        self._following.add(callback)
        self._wants_ends = True

    async def over(self) -> None:
        """Wait until the server has said that the run is over, and raise RunOver.

        It says so to whoever asks or waits when the run ends, so it is heard of at once by a client
        that follows the ends of attempts.
        """
        await self._here(self._link.over())

    async def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        return await self._ask(int, verbs.Enqueue(rollouts=tuple(rollouts)))

    async def claim(
        self, worker: str, *, limit: int = 1, wait_s: float = 0.0, lease_s: float = 60.0
    ) -> list[Lease]:
        if limit < 1:
            return []
        leases = await self._here(self._claim(worker, limit, wait_s, lease_s))
        self._held |= {(x.rollout.id, x.attempt): (x, lease_s) for x in leases}
        return leases

    async def heartbeat(self, leases: Sequence[Lease], *, lease_s: float = 60.0) -> list[Lease]:
        of = {(lease.rollout.id, lease.attempt): lease for lease in leases}
        ask = verbs.Heartbeat(leases=tuple(held(x) for x in of.values()), lease_s=lease_s)
        lost: list[tuple[str, int]] = await self._ask(list, ask)
        for key in lost:
            self._held.pop(key, None)
        gone = set(lost)
        return [lease for lease in leases if (lease.rollout.id, lease.attempt) in gone]

    async def expire_leases(self, *, now: float | None = None) -> list[str]:
        return await self._ask(list, verbs.ExpireLeases(now=now))

    async def record_calls(self, calls: Sequence[Call]) -> None:
        of = ((x.rollout_id, pack(x, f"call {x.id} of rollout {x.rollout_id}")) for x in calls)
        await self._here(self._gathering.promise(list(of), (verbs.RecordCalls, "calls")))

    async def supersede_calls(self, rollout_id: str, attempt: int, ids: Sequence[str]) -> None:
        ask = verbs.SupersedeCalls(rollout_id=rollout_id, attempt=attempt, ids=tuple(ids))
        await self._here(self._gathering.promise([(rollout_id, pack(ask, "a question"))], None))

    async def record_spans(self, spans: Sequence[Span]) -> None:
        of = ((x.rollout_id, pack(x, f"span {x.id} of rollout {x.rollout_id}")) for x in spans)
        await self._here(self._gathering.promise(list(of), (verbs.RecordSpans, "spans")))

    async def finish(self, lease: Lease, outcome: Outcome) -> Status:
        name = lease.rollout.id
        ask = verbs.Finish(lease=held(lease), outcome=outcome)
        owner = f"the outcome of rollout {name}, attempt {lease.attempt}"
        try:
            status = await self._ask(str, ask, owner=owner, lanes=[name])
        except LeaseLost:
            self._let_go(name, lease.attempt)
            raise
        self._let_go(name, lease.attempt)
        return cast(Status, status)

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return await self._ask(int, verbs.Cancel(rollout_ids=tuple(rollout_ids)))

    async def wait_finished(
        self, rollout_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> list[str]:
        if not rollout_ids:
            return []
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = max(0.0, min(until - time.monotonic(), _WAIT_S))
            ask = verbs.WaitFinished(rollout_ids=tuple(rollout_ids), wait_s=left)
            finished: list[str] = await self._here(self._late(ask, left))
            if finished or time.monotonic() >= until:
                return finished

    async def results(self, rollout_ids: Sequence[str]) -> list[RolloutResult]:
        return await self._ask(list, verbs.Results(rollout_ids=tuple(rollout_ids)))

    async def add_rewards(self, rewards: Sequence[Reward]) -> None:
        lanes = [reward.rollout_id for reward in rewards]
        await self._ask(type(None), verbs.AddRewards(rewards=tuple(rewards)), lanes=lanes)

    async def commit_step(self, step: StepRecord) -> None:
        await self._ask(type(None), verbs.CommitStep(step=step), owner=f"step {step.step}")

    async def add_checkpoint(self, step: int, folder: str) -> None:
        await self._ask(type(None), verbs.AddCheckpoint(step=step, folder=folder))

    async def steps(self) -> list[StepRecord]:
        return await self._ask(list, verbs.Steps())

    async def discard_after(self, step: int) -> int:
        return await self._ask(int, verbs.DiscardAfter(step=step))

    async def forget(self, split: Split, first: int, last: int) -> int:
        return await self._ask(int, verbs.Forget(split=split, first=first, last=last))

    async def counts(self) -> dict[str, int]:
        return await self._ask(dict, verbs.Counts())

    async def close(self) -> None:
        """Send what was promised, and close all connections; the store itself goes on."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            await self._here(self._close())

    async def _close(self) -> None:
        await self._desk.aclose(StoreError("the store is closed"))
        await self._gathering.drain()
        tasks = [task for task in (*self._tasks, self._follows) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lost = self._gathering.lost
        await self._gathering.aclose()
        await self._link.aclose()
        if lost is not None:
            raise lost

    async def _here(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it in the event loop that the connections belong to."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        if self._wants_ends and self._follows is None and not self._closed:
            self._follows = self._loop.create_task(self._follow())
        if running is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _ask(
        self, kind: type[T], ask: Ask, *, owner: str = "a question", lanes: Sequence[str] = ()
    ) -> T:
        """The answer to a question that does not wait, of the Python type that is expected."""
        if self._closed:
            raise StoreError("the store is closed")
        raw = await self._here(self._gathering.ask(pack(ask, owner), lanes))
        return _expected(kind, read_answer(type(ask), raw))

    async def _late(self, ask: Record, wait_s: float) -> Any:  # noqa: ANN401 - as the verb has it
        """The answer to a question that waits at the server."""
        assert isinstance(ask, Ask)
        body = pack(ask, "a question")
        raw = await self._link.post(verb_of(type(ask)), body, wait_s=wait_s)
        return read_answer(type(ask), raw)

    async def _claim(self, worker: str, limit: int, wait_s: float, lease_s: float) -> list[Lease]:
        if wait_s > 0:
            return await self._desk.claim(worker, limit=limit, wait_s=wait_s, lease_s=lease_s)
        one = verbs.Claimant(worker=worker, limit=limit)
        asking = asyncio.ensure_future(
            self._ask(list, verbs.Claim(workers=(one,), lease_s=lease_s))
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._claimed_for_nobody)
            raise

    def _claimed_for_nobody(self, asking: "asyncio.Task[list[Lease]]") -> None:
        if not asking.cancelled() and not asking.exception() and asking.result():
            self._unwanted(asking.result())

    async def _claim_late(self, ask: verbs.Claim) -> list[Lease]:
        return await self._late(ask, ask.wait_s)

    def _unwanted(self, leases: Sequence[Lease]) -> None:
        ask = verbs.GiveBack(leases=tuple(held(lease) for lease in leases))
        task = asyncio.ensure_future(self._give_back(ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _give_back(self, ask: verbs.GiveBack) -> None:
        await self._gathering.ask(pack(ask, "leases"))

    async def _follow(self) -> None:
        await self._following.run()

    async def _ends(self, ask: verbs.Ends) -> verbs.Heard:
        return await self._late(ask, ask.wait_s)

    def _let_go(self, rollout_id: str, attempt: int) -> None:
        self._held.pop((rollout_id, attempt), None)

    async def _lost(self) -> list[tuple[str, int]]:
        """Attempts of this client that have ended without its doing."""
        of_length: dict[float, list[Lease]] = {}
        for lease, lease_s in self._held.values():
            of_length.setdefault(lease_s, []).append(lease)
        lost = [
            lease
            for lease_s, leases in of_length.items()
            for lease in await self.heartbeat(leases, lease_s=lease_s)
        ]
        return [(lease.rollout.id, lease.attempt) for lease in lost]


def _expected(kind: type[T], value: object) -> T:
    assert isinstance(value, kind), "read_answer has checked it"
    return value
