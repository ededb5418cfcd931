"""Simulated agents, and the processes that a store's benchmark is made of.

Runs in the environment of every contestant, so it needs nothing but the standard library. An agent
claims a rollout, sleeps for a number of rounds, emits a span after each, and finishes; there is no
model. `store_fulmen.py` and `store_agentlightning.py` say how each of these is done.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Protocol

ROUNDS = (1, 5)
SLEEP_S = (0.1, 0.5)
"""Bounds of the uniform draws of a rollout; on the average it takes 0.9 s."""
MEAN_BUSY_S = sum(ROUNDS) / 2 * sum(SLEEP_S) / 2
TEXT = "The quick brown fox jumps over the lazy dog. " * 6
"""What a span carries, beside two short attributes."""


WARM_UP_S = 3.0
LONGEST_S = 60.0
"""Neither warm-up nor measurement takes longer, however slow the store is."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """The agents of one process."""

    url: str
    key: str
    first: int
    """Number of its first agent."""
    agents: int
    seconds: float
    """How long it is measured at least."""


@dataclass(slots=True)
class Tally:
    """What the agents of a process did."""

    finished: int = 0
    rounds: int = 0
    """Of the finished ones: as many spans were emitted."""
    slept_s: float = 0.0
    """By the finished ones."""


@dataclass(frozen=True, slots=True)
class Round:
    """What an agent's span says."""

    number: int
    started: float
    ended: float
    """Unix time, seconds."""


class Side(Protocol):
    """A store's client, as an agent uses it."""

    async def claim(self, worker: str) -> Any:
        """Wait for a rollout."""
        ...

    async def span(self, ticket: Any, what: Round) -> None:
        """Emit a span of the rollout."""
        ...

    async def finish(self, ticket: Any) -> None:
        """Return once the end of the rollout is confirmed."""
        ...


Connect = Callable[[str, str], AbstractAsyncContextManager[Side]]
"""A client for a URL and a key."""


async def agent(side: Side, number: int, tally: Tally) -> None:
    """One agent, for ever."""
    draw, worker = Random(number), f"agent-{number}"
    await asyncio.sleep(draw.random() * MEAN_BUSY_S)
    while True:
        ticket = await side.claim(worker)
        rounds, slept = draw.randint(*ROUNDS), 0.0
        for place in range(rounds):
            started, pause = time.time(), draw.uniform(*SLEEP_S)
            await asyncio.sleep(pause)
            slept += pause
            await side.span(ticket, Round(place, started, time.time()))
        await side.finish(ticket)
        tally.finished += 1
        tally.rounds += rounds
        tally.slept_s += slept


async def _while_agents_work(seconds: float, wanted: int, tally: Tally) -> None:
    """So many seconds, and more until so many further rollouts are finished.

    A store that cannot keep pace serves its agents in waves; whole ones are to be counted.
    """
    started, before = time.monotonic(), tally.finished
    while (past := time.monotonic() - started) < LONGEST_S:
        if past >= seconds and tally.finished - before >= wanted:
            break
        await asyncio.sleep(0.05)


async def run_agents(crowd: Crowd, connect: Connect) -> None:
    """The agents of this process: says when ready, begins with the next line, says what was done.

    `finished` in the last line are all, `counted` those of `seconds`, `cpu_s` the process's time in
    these.
    """
    tally = Tally()
    async with connect(crowd.url, crowd.key) as side:
        say(ready=True)
        await asyncio.to_thread(sys.stdin.readline)
        numbers = range(crowd.first, crowd.first + crowd.agents)
        work = asyncio.gather(*(agent(side, number, tally) for number in numbers))
        try:
            await _or_failure(work, _while_agents_work(WARM_UP_S, crowd.agents, tally))
            started, before = time.monotonic(), tally.finished
            cpu_s = time.process_time()
            await _or_failure(work, _while_agents_work(crowd.seconds, crowd.agents, tally))
            measured = {
                "counted": tally.finished - before,
                "seconds": time.monotonic() - started,
                "cpu_s": time.process_time() - cpu_s,
            }
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
    say(**asdict(tally), **measured)


async def _or_failure(work: "asyncio.Future[Any]", waiting: Coroutine[Any, Any, None]) -> None:
    """Wait; raises at once if an agent fails."""
    task = asyncio.ensure_future(waiting)
    done, _ = await asyncio.wait([work, task], return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()


async def serve_until_told(facts: Callable[[], Awaitable[dict[str, Any]]], **ready: object) -> None:
    """A server's process: says how it is reached, answers each line with its facts, until the end
    of its input."""
    say(**ready)
    while await asyncio.to_thread(sys.stdin.readline):
        say(**await facts(), cpu_s=time.process_time())


def say(**facts: object) -> None:
    """One line of JSON; a blank line before it, where libraries print without one."""
    print("\n" + json.dumps(facts), flush=True)
