"""Agents at work: leases from the store in, outcomes back, a set number at a time."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import ParamSpec, Self

from fulmen.runner.agents import AgentSpec, check_agent
from fulmen.runner.process import STOP_GRACE_S, Hooks, Observation, WorkerProcess
from fulmen.runner.wire import Rewarded, Seen, Setup
from fulmen.schema.errors import AgentError, DataError, LeaseLost, RunOver
from fulmen.schema.records import Lease, Outcome
from fulmen.store.base import Store

P = ParamSpec("P")
_MOST_HINTS = 100
"""Different ones that are told; some carry what an agent wrote, and there is no end to that."""
_CLAIM_WAIT_S = 30.0
_TELL_S = 10.0
"""When the pool is closed, results that are there already have so long to reach the store."""
_TAKEN = Outcome(failure="cancelled", error="the store has ended the attempt")
_CLOSED = Outcome(failure="infrastructure", error="its worker was closed")
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


@dataclass(slots=True, eq=False)
class _Held:
    """A lease, from the claim until its end has been told."""

    lease: Lease
    over: bool = False
    """The store has ended the attempt already; there is nothing left to tell."""
    process: WorkerProcess | None = None
    """Where it runs."""
    ticket: int = -1
    """Its name there."""


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
        self._held: dict[tuple[str, int], _Held] = {}
        """By rollout and attempt."""
        self._ends: set[tuple[str, int]] = set()
        """Of attempts that are not held: one may be on its way from the claim."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Condition()
        self._settled = asyncio.Event()
        self._broken: asyncio.Future[None] | None = None
        self._dispatching: asyncio.Task[None] | None = None
        self._closing = False
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
        self._listen()
        self._dispatching = self._spawn(self._tasks, self._dispatch)
        self._spawn(self._tasks, self._keep_leases)
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

    def _spawn(
        self,
        tasks: set[asyncio.Task[None]],
        work: Callable[P, Coroutine[None, None, None]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> asyncio.Task[None]:
        """Start a part of the pool, which breaks it if it fails."""
        # Called in the task: one that is cancelled before it has begun leaves no coroutine behind.
        task = asyncio.create_task(self._guard(lambda: work(*args, **kwargs)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def _listen(self) -> None:
        """Hear from the store which attempts have ended, wherever that was decided."""
        loop = asyncio.get_running_loop()

        def ended(rollout_id: str, attempt: int) -> None:
            with contextlib.suppress(RuntimeError):  # the pool's loop is closed
                loop.call_soon_threadsafe(self._taken, (rollout_id, attempt))

        self._store.on_attempt_end(ended)

    async def _start_process(self) -> None:
        hooks = Hooks(self._ended, self._observed, self._retired)
        process = WorkerProcess(self._setup, hooks)
        await process.start()
        self._processes.append(process)
        self._spawn(self._tasks, self._watch, process)
        async with self._idle:
            self._idle.notify_all()

    def _retired(self) -> None:
        """A process takes nothing more; another takes its place now."""
        if not self._closing:
            self._spawn(self._tasks, self._start_process)

    async def _watch(self, process: WorkerProcess) -> None:
        """Replace a process that ends."""
        how = await process.listen()
        self._processes.remove(process)
        self.counters.deaths += 1
        if not process.killed:
            self._deaths_in_a_row = 0 if process.finished else self._deaths_in_a_row + 1
        if self._deaths_in_a_row >= _DEATHS:
            raise AgentError(
                f"agent {self._setup.agent.target!r} ended its process {_DEATHS} times in a row "
                f"without finishing one task ({how})",
                hint="run it on one task by hand",
            )
        if not (process.retired or self._closing):
            await self._start_process()

    async def _dispatch(self) -> None:
        """Claim as many leases as there are free places, and hand them out."""
        while True:
            async with self._idle:
                await self._idle.wait_for(lambda: self._free() > 0 and self._taking())
            self._ends.clear()
            leases = await self._store.claim(
                self._name, limit=self._free(), wait_s=_CLAIM_WAIT_S, lease_s=self._lease_s
            )
            arrived = [_Held(x, over=_key(x) in self._ends) for x in leases]
            self._held |= {_key(held.lease): held for held in arrived}
            self.counters.running = len(self._held)
            for held in arrived:
                await self._place(held)

    async def _place(self, held: _Held) -> None:
        """Have an attempt run where the fewest do."""
        async with self._idle:
            await self._idle.wait_for(lambda: held.over or self._taking())
        # Nothing may come between: a process that takes now may be gone after the next wait.
        if held.over:
            self._ended(held.lease, _TAKEN)
            return
        held.process = min(self._taking(), key=lambda process: len(process.running))
        held.ticket = held.process.run(held.lease)

    def _taking(self) -> list[WorkerProcess]:
        return [process for process in self._processes if process.takes]

    def _free(self) -> int:
        return self._workers - len(self._held)

    def _taken(self, key: tuple[str, int]) -> None:
        """The store has ended an attempt: its agent is stopped at once."""
        held = self._held.get(key)
        if held is None:
            self._ends.add(key)
            return
        held.over = True
        if held.process is not None:
            held.process.stop(held.ticket, _TAKEN)

    def _ended(self, lease: Lease, outcome: Outcome) -> None:
        counters = self.counters
        counters.finished += 1
        if outcome.failure is not None:
            counters.failures[outcome.failure] = counters.failures.get(outcome.failure, 0) + 1
        self._held[_key(lease)].process = None
        self._spawn(self._telling, self._tell, self._held[_key(lease)], outcome)
        self._settled.set()

    async def _tell(self, held: _Held, outcome: Outcome) -> None:
        """Have the store know how an attempt ended. Its lease is kept until then."""
        try:
            if held.over:
                self.counters.refused += 1
            else:
                await self._finish(held.lease, outcome)
        except LeaseLost:
            self.counters.refused += 1
        finally:
            del self._held[_key(held.lease)]
            self.counters.running = len(self._held)
            async with self._idle:
                self._idle.notify_all()

    async def _finish(self, lease: Lease, outcome: Outcome) -> None:
        try:
            await self._store.finish(lease, outcome)
        except DataError as error:
            # Too large for the way there, say: the agent's doing, and no reason to end others.
            why = f"its outcome cannot be kept: {error.message}"
            await self._store.finish(lease, Outcome(failure="agent", error=why))

    async def _observed(self, report: Observation) -> None:
        """Keep what an attempt shows while it runs."""
        if isinstance(report, Seen | Rewarded):
            try:
                if isinstance(report, Seen):
                    await self._store.record_spans([report.span])
                else:
                    await self._store.add_rewards([report.reward])
            except (LeaseLost, RunOver):  # the agent is stopped in order, and still heard
                self.counters.refused += 1
        elif self._hint is not None and report.text not in self._hints:
            if len(self._hints) >= _MOST_HINTS:
                return
            self._hints.add(report.text)
            self._hint(report.text)

    async def _keep_leases(self) -> None:
        """Renew what is running, and stop what was taken away."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            leases = [held.lease for held in self._held.values() if not held.over]
            for lost in await self._store.heartbeat(leases, lease_s=self._lease_s):
                self._taken(_key(lost))

    async def _guard(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run a part of the pool; if it fails, the pool is broken."""
        assert self._broken is not None
        try:
            await work()
        except Exception as error:
            # Whatever it is: a pool that has lost a part would wait for ever.
            if not self._broken.done():
                self._broken.set_exception(error)

    async def _close(self) -> None:
        """Stop agents, tell how they ended, and end the processes: within some twenty seconds."""
        self._closing = True
        if self._dispatching is not None:
            self._dispatching.cancel()
            await asyncio.gather(self._dispatching, return_exceptions=True)
        for held in list(self._held.values()):
            if held.process is not None:
                held.process.stop(held.ticket, _CLOSED)
            elif held.ticket < 0:
                self._ended(held.lease, _CLOSED)  # it was never begun
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S + 1):  # those who do not yield are killed
                await self._quiet()
        if self._telling:
            await asyncio.wait(self._telling, timeout=_TELL_S)
        tasks = [*self._telling, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._processes))
        if self._broken is not None:
            self._broken.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._broken

    async def _quiet(self) -> None:
        """Wait until nothing runs."""
        while any(process.running for process in self._processes):
            self._settled.clear()
            await self._settled.wait()


def _key(lease: Lease) -> tuple[str, int]:
    return lease.rollout.id, lease.attempt
