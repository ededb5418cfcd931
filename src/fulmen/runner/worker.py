"""A worker process: one long-lived event loop that runs attempts for the pool.

Started as `python -m fulmen.runner.worker ORDERS REPORTS`, two connected sockets as file
descriptors. It stays small: nothing of the learner, the engine or the store is imported here.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys

from fulmen.runner import attribution, capture
from fulmen.runner.agents import check_one_argument, load_function
from fulmen.runner.observing import observed
from fulmen.runner.running import Runner, command_runner, environment, function_runner
from fulmen.runner.wire import (
    MOST_BYTES,
    Ended,
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
    gc.freeze()  # what the agent has imported stays: no need to look through it again and again
    reports.send(Ready())
    tasks: dict[int, asyncio.Task[None]] = {}
    while (order := await receive_order(orders)) is not None:
        if isinstance(order, Start):
            if setup.capacity == 1:
                os.environ.update(environment(setup.gateway, order.key))
            task = asyncio.create_task(_attempt(run, order, reports))
            tasks[order.ticket] = task
            task.add_done_callback(lambda _, ticket=order.ticket: tasks.pop(ticket, None))
        elif isinstance(order, Stop) and order.ticket in tasks:
            tasks[order.ticket].cancel()
    for task in tasks.values():
        task.cancel()
    await asyncio.wait([*tasks.values(), asyncio.create_task(asyncio.sleep(0))], timeout=3)


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


async def _attempt(run: Runner, start: Start, reports: Reports) -> None:
    try:
        outcome = await run(start)
    except asyncio.CancelledError:
        outcome = Outcome(failure="cancelled", error="stopped")
    except Exception as error:
        # Not the agent's doing: it could not even be started.
        outcome = Outcome(failure="infrastructure", error=f"{type(error).__name__}: {error}")
    try:
        reports.send(Ended(ticket=start.ticket, outcome=outcome))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        lost = Outcome(failure="agent", error=f"its outcome cannot be written as JSON ({error!r})")
        reports.send(Ended(ticket=start.ticket, outcome=lost))


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
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))
    # An agent's threads cannot be stopped, and would keep the process for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
