"""A worker process: one long-lived event loop that runs attempts for the pool.

Started as `python -m fulmen.runner.worker ORDERS REPORTS`, two connected sockets as file
descriptors. It stays small: nothing of the learner, the engine or the store is imported here.
"""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from concurrent.futures import Future

from fulmen.runner import attribution, capture
from fulmen.runner.agents import check_one_argument, load_function
from fulmen.runner.observing import observed
from fulmen.runner.running import Runner, StillRunning, command_runner, environment, function_runner
from fulmen.runner.wire import (
    MOST_BYTES,
    Ended,
    Freed,
    Hint,
    Ready,
    Reports,
    Setup,
    Start,
    Stop,
    receive_order,
)
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Outcome
from fulmen.tracing.switch import switch_on

_PLACEHOLDER = "set-per-request-by-fulmen"
"""What clients are made with when attempts share a process; replaced when they send."""


async def serve(orders: asyncio.StreamReader, reports: Reports) -> None:
    """Work until the pool is gone."""
    setup = await receive_order(orders)
    if not isinstance(setup, Setup):
        return
    try:
        run = _prepare(setup, reports)
    except AgentError as error:
        reports.send(Ready(error=str(error)))
        return
    reports.send(Ready())
    attempts = _Attempts(run, reports)
    while (order := await receive_order(orders)) is not None:
        if isinstance(order, Start):
            if setup.capacity == 1:
                os.environ.update(environment(setup.gateway, order.key))
            attempts.start(order)
        elif isinstance(order, Stop):
            attempts.stop(order.ticket)
    await attempts.close()


def _prepare(setup: Setup, reports: Reports) -> Runner:
    """Set the process up and import the agent."""
    os.environ.update(environment(setup.gateway, _PLACEHOLDER))
    if setup.agent.kind == "command":
        return command_runner(setup.agent.target, setup.gateway)
    if setup.agent.kind == "http":
        # Here, because httpx takes a tenth of a second, which other agents may not need.
        from fulmen.runner.http_agent import http_runner

        return http_runner(setup.agent.target, setup.gateway)
    spans = switch_on(lambda text: reports.send(Hint(text=text))) if setup.tracing else None
    attribution.install(setup.gateway, spans)
    capture.install()
    function = load_function(setup.agent.target)
    check_one_argument(function, setup.agent.target)
    return observed(function_runner(function, setup.capacity), reports, spans)


class _Attempts:
    """Those under way. Of each that was started an end is reported, whatever happens to it."""

    def __init__(self, run: Runner, reports: Reports) -> None:
        self._run, self._reports = run, reports
        self._tasks: dict[int, asyncio.Task[Outcome]] = {}
        self._stopped: set[int] = set()
        self._stuck: dict[int, Future[object]] = {}
        """Threads that go on after the end of their attempt."""

    def start(self, order: Start) -> None:
        """Begin one."""
        task = asyncio.create_task(self._attempt(order))
        self._tasks[order.ticket] = task
        # Told when the task is done, not in it: one that is stopped at once never begins.
        task.add_done_callback(functools.partial(self._ended, order.ticket))

    def stop(self, ticket: int) -> None:
        """End one that may have ended by itself."""
        if ticket in self._tasks:
            self._stopped.add(ticket)
            self._tasks[ticket].cancel()

    async def close(self) -> None:
        """End all, within a few seconds."""
        for ticket in self._tasks:
            self.stop(ticket)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=3)

    async def _attempt(self, order: Start) -> Outcome:
        try:
            return await self._run(order)
        except StillRunning as stuck:
            self._stuck[order.ticket] = stuck.thread
            raise
        except Exception as error:
            # Not the agent's doing: it could not even be started.
            return Outcome(failure="infrastructure", error=f"{type(error).__name__}: {error}")

    def _ended(self, ticket: int, task: asyncio.Task[Outcome]) -> None:
        del self._tasks[ticket]
        stopped = ticket in self._stopped
        self._stopped.discard(ticket)
        if not task.cancelled():
            outcome = task.result()
        elif stopped:
            outcome = Outcome(failure="cancelled", error="stopped")
        else:
            outcome = Outcome(failure="agent", error="CancelledError: it cancelled its own task")
        stuck = self._stuck.pop(ticket, None)
        report = Ended(ticket=ticket, outcome=outcome, stopped=stopped, stuck=stuck is not None)
        try:
            self._reports.send(report)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            why = f"its outcome cannot be written as JSON ({error!r})"
            lost = Outcome(failure="agent", error=why)
            self._reports.send(Ended(ticket=ticket, outcome=lost, stopped=stopped))
        if stuck is not None:
            stuck.add_done_callback(lambda _: self._reports.send(Freed(ticket=ticket)))


async def _main(orders: int, reports: int) -> None:
    for descriptor in (orders, reports):
        os.set_inheritable(descriptor, False)  # what the agent starts must not keep them open
    reader, writer = await asyncio.open_connection(
        sock=socket.socket(fileno=orders), limit=MOST_BYTES
    )
    with contextlib.suppress(ConnectionError):
        await serve(reader, Reports(socket.socket(fileno=reports)))
    writer.close()


def main() -> None:
    """Entry point of the process."""
    # Ctrl-C reaches every process of the terminal; the pool decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _run_through(_main(int(sys.argv[1]), int(sys.argv[2])))
    except BaseException:
        os._exit(1)
    # An agent's threads cannot be stopped, and would keep the process for ever.
    os._exit(0)


def _run_through(work: Coroutine[None, None, None]) -> None:
    """As `asyncio.run` does; but what wants to end the process in some task of an agent's ends that
    task, and those that wait for it, and nobody else."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(work)
        while not task.done():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_until_complete(task)
        task.result()


if __name__ == "__main__":
    main()
