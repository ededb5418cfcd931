"""A worker process as the pool sees it: orders go in, reports come out, and it can be ended."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fulmen.engine.platform import environment_for
from fulmen.runner.wire import (
    MOST_BYTES,
    Ended,
    Freed,
    FromWorker,
    Hint,
    Ready,
    Rewarded,
    Seen,
    Setup,
    Start,
    Stop,
    receive_report,
    send,
)
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Lease, Outcome
from fulmen.schema.role_keys import KEY_VARIABLE

Observation: TypeAlias = Seen | Rewarded | Hint


@dataclass(frozen=True, slots=True)
class Hooks:
    """What is told of a process while it works."""

    ended: Callable[[Lease, Outcome], None]
    """Of every attempt, whichever way it ends, after everything that was observed of it."""
    observed: Callable[[Observation], Awaitable[None]]
    retired: Callable[[], None]
    """It takes no more attempts, and ends after the last that it has."""


_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)


def _for_agents(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the worker's key, which no agent needs, and without what torchrun
    tells its own processes: an agent that loads PyTorch would take itself for one of them.

    >>> _for_agents({"RANK": "0", "TORCHELASTIC_RUN_ID": "7", "HOME": "/"})
    {'HOME': '/'}
    """
    environment = {name: value for name, value in environment.items() if name != KEY_VARIABLE}
    if "TORCHELASTIC_RUN_ID" not in environment:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_TORCHRUN and not name.startswith("TORCHELASTIC_")
    }


class WorkerProcess:
    """One process and the attempts it is running."""

    def __init__(self, setup: Setup, hooks: Hooks) -> None:
        """Starts nothing yet."""
        self.running: dict[int, Lease] = {}
        self.finished = 0
        """Attempts that came to an end of their own in this process."""
        self.retired = False
        """Threads in it go on that should have stopped."""
        self.killed = False
        """By us, and not by what the agent did."""
        self._gone = False
        self._stuck: set[int] = set()
        self._setup = setup
        self._hooks = hooks
        self._connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        """Orders out, reports in; whole, because a writer that nobody keeps closes its socket."""
        self._next_ticket = 0
        self._verdicts: dict[int, Outcome] = {}
        """Outcomes decided here for attempts that are being stopped."""
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}

    @property
    def takes(self) -> bool:
        """Whether it may be given attempts."""
        return not (self._gone or self.retired or self.killed)

    @property
    def _orders(self) -> asyncio.StreamWriter:
        return self._connections[0][1]

    @property
    def _reports(self) -> asyncio.StreamReader:
        return self._connections[1][0]

    async def start(self) -> None:
        """Start the process and wait until it has imported the agent.

        Raises:
            AgentError: the agent cannot be imported, or ends the process while it is imported.
        """
        orders, their_orders = socket.socketpair()
        reports, their_reports = socket.socketpair()
        try:
            with their_orders, their_reports:
                self._process = await self._spawn(their_orders, their_reports)
            for ours in (orders, reports):
                self._connections.append(await asyncio.open_connection(sock=ours, limit=MOST_BYTES))
            send(self._orders, self._setup)
            report = await receive_report(self._reports)
            while isinstance(report, Hint):  # of what the agent imports
                await self._hooks.observed(report)
                report = await receive_report(self._reports)
            if not isinstance(report, Ready) or report.error:
                raise self._refusal(report, await self._process.wait())
        except BaseException:  # refused, or the pool is closed while this process starts
            if hasattr(self, "_process"):
                self.kill()
                await self._process.wait()
            self._close()
            orders.close()
            reports.close()
            raise

    async def _spawn(self, *connections: socket.socket) -> asyncio.subprocess.Process:
        descriptors = [connection.fileno() for connection in connections]
        return await asyncio.create_subprocess_exec(
            self._setup.agent.python or sys.executable,
            "-m",
            "fulmen.runner.worker",
            *map(str, descriptors),
            pass_fds=descriptors,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # A group of its own: Ctrl-C is for the pool, which stops its workers in order.
            start_new_session=True,
            env=environment_for(1, _for_agents(os.environ)),
        )

    async def listen(self) -> str:
        """Take reports until the process is gone; returns how it ended.

        Attempts that it was running then end as infrastructure failures.
        """
        while (report := await receive_report(self._reports)) is not None:
            if isinstance(report, Ended):
                self.finished += 1
                if not report.stopped:  # it had ended when it was to be stopped
                    self._verdicts.pop(report.ticket, None)
                self._settle(report.ticket, report.outcome)
                if report.stuck:
                    self._stuck.add(report.ticket)
                    asyncio.get_running_loop().call_later(STOP_GRACE_S, self._retire)
            elif isinstance(report, Freed):
                self._stuck.discard(report.ticket)
            elif not isinstance(report, Ready):
                await self._hooks.observed(report)
        self._gone = True  # and from here on it is given nothing that would be forgotten
        how = _how(await self._process.wait())
        for ticket in list(self.running):
            lost = Outcome(failure="infrastructure", error=f"the worker process ended ({how})")
            self._settle(ticket, lost)
        self._close()
        return how

    def run(self, lease: Lease) -> int:
        """Start an attempt, to be stopped when its deadline is over; returns its ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self.running[ticket] = lease
        rollout = lease.rollout
        order = Start(
            ticket=ticket,
            rollout_id=rollout.id,
            attempt=lease.attempt,
            key=lease.key,
            input=rollout.task.input,
            deadline_s=rollout.deadline_s,
        )
        send(self._orders, order)
        late = Outcome(failure="timeout", error=f"stopped after {rollout.deadline_s:g} s")
        self._later(ticket, rollout.deadline_s, self.stop, ticket, late)
        return ticket

    def stop(self, ticket: int, verdict: Outcome) -> None:
        """End an attempt with a verdict; if it does not yield, end the process under it."""
        if ticket in self.running and ticket not in self._verdicts:
            self._verdicts[ticket] = verdict
            send(self._orders, Stop(ticket=ticket))
            self._later(ticket, STOP_GRACE_S, self.kill)

    def kill(self) -> None:
        """End the process at once, with whatever it started in its group."""
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _retire(self) -> None:
        """A thread did not stop: what else runs here comes to its end, and then the process."""
        if self._stuck and not self.retired and not self._gone:
            self.retired = True
            self._hooks.retired()
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.retired and not self.running and not self._gone:
            self.kill()

    async def close(self) -> None:
        """Let the process end, and see that it does."""
        self._gone = True
        self._close()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_GRACE_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def _close(self) -> None:
        for _, writer in self._connections:
            writer.close()

    def _settle(self, ticket: int, outcome: Outcome) -> None:
        lease = self.running.pop(ticket, None)
        for timer in self._timers.pop(ticket, []):
            timer.cancel()
        verdict = self._verdicts.pop(ticket, None)
        if lease is not None:
            if verdict is not None:
                outcome = Outcome(failure=verdict.failure, error=verdict.error, log=outcome.log)
            self._hooks.ended(lease, outcome)
        self._end_if_idle()

    def _refusal(self, report: FromWorker | None, code: int) -> AgentError:
        """Why the agent cannot be run."""
        if isinstance(report, Ready):
            return AgentError(report.error)
        target = self._setup.agent.target
        return AgentError(
            f"agent {target!r} ended its process while it was imported ({_how(code)})"
        )

    def _later(self, ticket: int, delay_s: float, call: Callable[..., None], *args: object) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, call, *args)
        self._timers.setdefault(ticket, []).append(timer)


STOP_GRACE_S = 3.0
"""An attempt that is told to stop has so long before its process is killed under it."""
_CLOSE_GRACE_S = 5.0


def _how(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
