"""Agents at work: leases from the store in, outcomes back, a set number at a time."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from fulmen.runner.agents import AgentSpec, check_agent
from fulmen.runner.process import Observation, WorkerProcess
from fulmen.runner.wire import Rewarded, Seen, Setup
from fulmen.schema.errors import AgentError, LeaseLost
from fulmen.schema.records import Lease, Outcome
from fulmen.store.base import Store

_CLAIM_WAIT_S = 30.0
_ENDING_S = 5.0
"""So long a pool that closes waits for the store to take what has ended."""
_DEATHS = 5
"""So many processes in a row that died without finishing anything, and the agent is to blame."""


@dataclass(slots=True)
class Counters:
    """What the pool has done, for people to see."""

    running: int = 0
    finished: int = 0
    """Attempts that came to an end, failures included."""
    failures: dict[str, int] = field(default_factory=dict)
    """By kind."""
    refused: int = 0
    """Results and rewards that came too late."""
    deaths: int = 0
    """Worker processes that ended when they should not."""


class Pool:
    """`async with Pool(…) as pool:` keeps agents working on the store's queue."""

    def __init__(
        self,
        store: Store,
        agent: AgentSpec,
        *,
        base_url: str,
        workers: int,
        processes: int | None = None,
        trace: Callable[[str], None] | None = None,
        lease_s: float = 60.0,
    ) -> None:
        """`workers` agents run at once, spread over `processes` (default: the cores).

        With `trace`, what happens inside of function agents is watched; it is told, once each, why
        something cannot be.
        """
        check_agent(agent)
        wanted = processes or (os.cpu_count() or 1 if agent.kind == "function" else 1)
        self.counters = Counters()
        self._store = store
        self._workers = workers
        self._count = min(wanted, workers)
        capacity = -(-workers // self._count)
        self._setup = Setup(
            agent=agent, gateway=base_url, capacity=capacity, tracing=trace is not None
        )
        self._hint = trace
        self._hints: set[str] = set()
        self._lease_s = lease_s
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._processes: list[WorkerProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._endings: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Condition()
        self._broken: asyncio.Future[None] | None = None
        self._deaths_in_a_row = 0

    async def __aenter__(self) -> Self:
        """Start the processes; raises AgentError if they cannot run the agent."""
        self._broken = asyncio.get_running_loop().create_future()
        try:
            started = [self._start_process() for _ in range(self._count)]
            for result in await asyncio.gather(*started, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self._close()
            raise
        for work in (self._dispatch(), self._keep_leases()):
            self._tasks.append(asyncio.create_task(self._guard(work)))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def broken(self) -> None:
        """Wait for what stops the pool, and raise it; else wait for ever."""
        assert self._broken is not None, "the pool has not been entered"
        await asyncio.shield(self._broken)

    async def _start_process(self) -> None:
        process = WorkerProcess(self._setup, self._ended, self._observed)
        await process.start()
        self._processes.append(process)
        self._tasks.append(asyncio.create_task(self._guard(self._watch(process))))

    async def _watch(self, process: WorkerProcess) -> None:
        """Replace a process that ends."""
        how = await process.listen()
        self._processes.remove(process)
        self.counters.deaths += 1
        self._deaths_in_a_row = 0 if process.finished else self._deaths_in_a_row + 1
        if self._deaths_in_a_row >= _DEATHS:
            raise AgentError(
                f"agent {self._setup.agent.target!r} ended its process {_DEATHS} times in a row "
                f"without finishing one task ({how})",
                hint="run it on one task by hand",
            )
        await self._start_process()
        async with self._idle:
            self._idle.notify_all()

    async def _dispatch(self) -> None:
        """Claim as many leases as there are free places, and hand them out."""
        while True:
            async with self._idle:
                await self._idle.wait_for(lambda: self._free() > 0 and bool(self._processes))
            leases = await self._store.claim(
                self._name, limit=self._free(), wait_s=_CLAIM_WAIT_S, lease_s=self._lease_s
            )
            for lease in leases:
                async with self._idle:
                    await self._idle.wait_for(lambda: bool(self._processes))
                self.counters.running += 1
                min(self._processes, key=lambda p: len(p.running)).run(lease)

    def _free(self) -> int:
        return self._workers - self.counters.running

    async def _ended(self, lease: Lease, outcome: Outcome) -> None:
        counters = self.counters
        counters.finished += 1
        if outcome.failure is not None:
            counters.failures[outcome.failure] = counters.failures.get(outcome.failure, 0) + 1
        # Beside what the process goes on to report: a store elsewhere takes its time to answer.
        ending = asyncio.create_task(self._guard(self._finish(lease, outcome)))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _finish(self, lease: Lease, outcome: Outcome) -> None:
        counters = self.counters
        try:
            await self._store.finish(lease, outcome)
        except LeaseLost:
            counters.refused += 1
        finally:
            counters.running -= 1
            async with self._idle:
                self._idle.notify_all()

    async def _observed(self, report: Observation) -> None:
        """Keep what an attempt shows while it runs."""
        if isinstance(report, Seen):
            await self._store.record_spans([report.span])
        elif isinstance(report, Rewarded):
            try:
                await self._store.add_rewards([report.reward])
            except LeaseLost:
                self.counters.refused += 1
        elif self._hint is not None and report.text not in self._hints:
            self._hints.add(report.text)
            self._hint(report.text)

    async def _keep_leases(self) -> None:
        """Renew what is running, and stop what was taken away."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            running = {
                (lease.rollout.id, lease.attempt): (process, ticket, lease)
                for process in self._processes
                for ticket, lease in process.running.items()
            }
            leases = [lease for _, _, lease in running.values()]
            for lost in await self._store.heartbeat(leases, lease_s=self._lease_s):
                process, ticket, _ = running[lost.rollout.id, lost.attempt]
                process.stop(ticket, Outcome(failure="cancelled", error="the lease was taken away"))

    async def _guard(self, work: Coroutine[None, None, None]) -> None:
        """Run a part of the pool; if it fails, the pool is broken."""
        assert self._broken is not None
        try:
            await work
        except Exception as error:
            # Whatever it is: a pool that has lost a part would wait for ever.
            if not self._broken.done():
                self._broken.set_exception(error)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._endings:
            await asyncio.wait(self._endings, timeout=_ENDING_S)
        for task in self._endings:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._endings, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._processes))
        if self._broken is not None:
            self._broken.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._broken
