"""A worker process as the pool sees it: orders go in, reports come out, and it can be ended."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable

from fulmen.runner.wire import Ended, FromWorker, Ready, Setup, Start, Stop, receive_report, send
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Lease, Outcome


class WorkerProcess:
    """One process and the attempts it is running."""

    def __init__(self, setup: Setup, ended: Callable[[Lease, Outcome], Awaitable[None]]) -> None:
        """`ended` is awaited for every attempt, whichever way it ends."""
        self.running: dict[int, Lease] = {}
        self.finished = 0
        """Attempts that came to an end of their own in this process."""
        self._setup = setup
        self._ended = ended
        self._next_ticket = 0
        self._verdicts: dict[int, Outcome] = {}
        """Outcomes decided here for attempts that are being stopped."""
        self._timers: dict[int, list[asyncio.TimerHandle]] = {}

    async def start(self) -> None:
        """Start the process and wait until it has imported the agent.

        Raises:
            AgentError: the agent cannot be imported, or ends the process while it is imported.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await self._spawn(theirs)
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**26)
            send(self._writer, self._setup)
            report = await receive_report(self._reader)
            if not isinstance(report, Ready) or report.error:
                raise self._refusal(report, await self._process.wait())
        except BaseException:  # refused, or the pool is closed while this process starts
            if hasattr(self, "_process"):
                self.kill()
                await self._process.wait()
            if hasattr(self, "_writer"):
                self._writer.close()
            ours.close()
            raise

    async def _spawn(self, connection: socket.socket) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fulmen.runner.worker",
            str(connection.fileno()),
            pass_fds=(connection.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # A group of its own: Ctrl-C is for the pool, which stops its workers in order.
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )

    async def listen(self) -> str:
        """Take reports until the process is gone; returns how it ended.

        Attempts that it was running then end as infrastructure failures.
        """
        while (report := await receive_report(self._reader)) is not None:
            if isinstance(report, Ended):
                self.finished += 1
                await self._settle(report.ticket, report.outcome)
        how = _how(await self._process.wait())
        for ticket in list(self.running):
            lost = Outcome(failure="infrastructure", error=f"the worker process ended ({how})")
            await self._settle(ticket, lost)
        self._writer.close()
        return how

    def run(self, lease: Lease) -> None:
        """Start an attempt, to be stopped when its deadline is over."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self.running[ticket] = lease
        rollout = lease.rollout
        send(
            self._writer,
            Start(
                ticket=ticket,
                rollout_id=rollout.id,
                key=lease.key,
                input=rollout.task.input,
                deadline_s=rollout.deadline_s,
            ),
        )
        late = Outcome(failure="timeout", error=f"stopped after {rollout.deadline_s:g} s")
        self._later(ticket, rollout.deadline_s, self.stop, ticket, late)

    def stop(self, ticket: int, verdict: Outcome) -> None:
        """End an attempt with a verdict; if it does not yield, end the process under it."""
        if ticket in self.running and ticket not in self._verdicts:
            self._verdicts[ticket] = verdict
            send(self._writer, Stop(ticket=ticket))
            self._later(ticket, _STOP_GRACE_S, self.kill)

    def kill(self) -> None:
        """End the process at once, with whatever it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Let the process end, and see that it does."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_GRACE_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def _settle(self, ticket: int, outcome: Outcome) -> None:
        lease = self.running.pop(ticket, None)
        for timer in self._timers.pop(ticket, []):
            timer.cancel()
        verdict = self._verdicts.pop(ticket, None)
        if lease is not None:
            if verdict is not None:
                outcome = Outcome(failure=verdict.failure, error=verdict.error, log=outcome.log)
            await self._ended(lease, outcome)

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


_STOP_GRACE_S = 3.0
"""An attempt that is told to stop has so long before its process is killed under it."""
_CLOSE_GRACE_S = 5.0


def _how(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
