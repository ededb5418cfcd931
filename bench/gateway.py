"""What the gateway costs: latency, CPU and memory; beside it, proxies that others put in its place.

The gateway runs alone on one core, in a process of its own; this process is the load and runs on
another, as does the backend where there is one. The engine says always the same after a given time,
so everything beyond that time is the gateway's. Peers are given as NAME=PYTHON, the interpreter of
an environment that has them; one that is not given is left out. Some three minutes:

    python bench/gateway.py litellm=… agentlightning=…
"""

import asyncio
import json
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from gateway_load import Client, Reply
from gateway_process import OTHER_CORE, PEERS, Options, Served, backend, fulmen
from results import result

REPEATS = 3
ANSWER = "17 + 25 = 42, and half of it is 21. So the number is 21."
LINE = "Carry {} over, add {} to it, then take {} away and say what is left.\n"
DELAY_S = 0.25
AGENTS, CONVERSATIONS, TURNS = 64, 2, 8
STREAMS = 1000


def question(number: int, lines: int) -> dict[str, Any]:
    """A user's message; other ones for other numbers."""
    draw = random.Random(number)
    text = "".join(LINE.format(*(draw.randrange(10, 99) for _ in range(3))) for _ in range(lines))
    return {"role": "user", "content": f"Task {number}. {text}"}


def body(served: Served, messages: Sequence[dict[str, Any]], **more: Any) -> bytes:
    """A request of the chat protocol."""
    asked = {"model": served.model, "messages": messages, "max_tokens": 1000, **more}
    return json.dumps(asked).encode()


def checked(reply: Reply) -> Reply:
    """The same; the benchmark ends if it is an error."""
    if reply.status != 200:
        raise SystemExit(f"HTTP {reply.status}: {reply.body[:500]!r}")
    return reply


def _listed(values: Sequence[float]) -> str:
    return "/".join(f"{value:.4g}" for value in values)


# Latency


async def converse(served: Served, number: int, client: Client) -> list[float]:
    """One agent's conversations of `TURNS` turns; returns the seconds of every call.

    Agents begin at any time within a conversation's length, so that at every moment some begin one
    and most are in the middle of theirs.
    """
    taken = []
    await asyncio.sleep(random.Random(number).random() * TURNS * DELAY_S)
    for conversation in range(CONVERSATIONS):
        messages = [question(number + 1_000_000 * conversation, 40)]
        for turn in range(TURNS):
            reply = checked(await client.post(body(served, messages)))
            taken.append(reply.seconds)
            messages += [{"role": "assistant", "content": reply.content()}, question(turn, 1)]
    return taken


async def direct() -> list[float]:
    """The same calls without a gateway: the engine's time as a task of an event loop sees it."""

    async def agent(number: int) -> list[float]:
        await asyncio.sleep(random.Random(number).random() * TURNS * DELAY_S)
        taken = []
        for _ in range(CONVERSATIONS * TURNS):
            started = time.perf_counter()
            await asyncio.sleep(DELAY_S)
            taken.append(time.perf_counter() - started)
        return taken

    return list(chain(*await asyncio.gather(*map(agent, range(AGENTS)))))


async def added_latency() -> None:
    """`AGENTS` agents with conversations of 2,000 tokens in front of an engine of 250 ms."""
    p50, p99, costs = [], [], []
    with fulmen(Options(ANSWER, AGENTS, delay_s=DELAY_S)) as served:
        clients = [await served.connect(number) for number in range(AGENTS)]
        for repeat in range(-1, REPEATS):
            bare = statistics.median(await direct())
            agents = [
                converse(served, 1000 * (repeat + 1) + number, client)
                for number, client in enumerate(clients)
            ]
            before = served.cpu_s()
            calls = list(chain(*await asyncio.gather(*agents)))
            cpu = served.cpu_s() - before
            if repeat >= 0:
                added = statistics.quantiles([1e3 * (one - bare) for one in calls], n=100)
                p50.append(added[49])
                p99.append(added[98])
                costs.append(1e3 * cpu / len(calls))
    print(f"latency: p50 {_listed(p50)}, p99 {_listed(p99)}; {served.ended}")
    result("gateway.added_ms.p50", statistics.median(p50), "ms")
    result("gateway.added_ms.p99", statistics.median(p99), "ms")
    result("gateway.cpu_ms_per_long_call", statistics.median(costs), "ms")


# Calls per second, and what a call costs


async def hammer(served: Served, calls: int) -> tuple[float, float]:
    """Short calls over 32 connections at once; returns calls per second and CPU-ms per call."""
    # New connections each time: some servers end those that are idle for five seconds.
    clients = [await served.connect(number) for number in range(32)]
    share = calls // len(clients)

    async def agent(number: int, client: Client) -> None:
        for call in range(share):
            checked(await client.post(body(served, [question(share * number + call, 1)])))

    started, before = time.perf_counter(), served.cpu_s()
    await asyncio.gather(*(agent(n, client) for n, client in enumerate(clients)))
    taken, cpu = time.perf_counter() - started, served.cpu_s() - before
    for client in clients:
        client.close()
    done = share * len(clients)
    return done / taken, 1e3 * cpu / done


async def calls_and_cpu(peers: dict[str, str]) -> None:
    """Recorded short calls: the gateway with its engine, and all that stand before a backend."""
    with ExitStack() as stack:
        behind = stack.enter_context(backend(ANSWER))
        contestants = {
            "fulmen": (stack.enter_context(fulmen(Options(ANSWER, 64))), 3200),
            "fulmen_external": (
                stack.enter_context(fulmen(Options(ANSWER, 64, backend=behind.url))),
                960,
            ),
        }
        for name, python in peers.items():
            served = stack.enter_context(PEERS[name](python, behind.url))
            contestants[name] = (served, 160)
        speeds = {name: [] for name in contestants}
        costs = {name: [] for name in contestants}
        for repeat in range(-1, REPEATS):
            for name, (served, calls) in contestants.items():
                await asyncio.sleep(0.5)  # what the one before left to do is done
                speed, cost = await hammer(served, calls)
                if repeat >= 0:
                    speeds[name].append(speed)
                    costs[name].append(cost)
    for name, (served, calls) in contestants.items():
        seen = f"{_listed(speeds[name])} a second, {_listed(costs[name])} CPU-ms each"
        print(f"{name}: {calls} calls a repeat, {seen}; {served.ended}")
    speed = {name: statistics.median(values) for name, values in speeds.items()}
    cost = {name: statistics.median(values) for name, values in costs.items()}
    result("gateway.calls_per_s", speed["fulmen"], "calls/s")
    result("gateway.cpu_ms_per_call", cost["fulmen"], "ms")
    for ours in ("fulmen", "fulmen_external"):
        for peer in peers:
            result(
                f"gateway.cpu_ms_per_call.{ours}_vs_{peer}",
                cost[ours],
                "ms",
                peer=f"{peer} before an HTTP backend",
                peer_value=cost[peer],
                higher_is_better=False,
            )
    for name in ("fulmen_external", *peers):
        result(f"gateway.calls_per_s.{name}", speed[name], "calls/s")


# Streams


async def stream_cost() -> None:
    """64 streams, a token every 20 ms; the CPU of a whole call is part of its chunks' share."""
    costs, chunks = [], 0
    options = Options(ANSWER, 64, interval_s=0.02, repeat=4)
    with fulmen(options) as served:
        clients = [await served.connect(number) for number in range(64)]
        for repeat in range(-1, REPEATS):
            before = served.cpu_s()
            asked = [
                client.post(body(served, [question(100 * repeat + n, 1)], stream=True))
                for n, client in enumerate(clients)
            ]
            replies = [checked(reply) for reply in await asyncio.gather(*asked)]
            cpu = served.cpu_s() - before
            if repeat >= 0:
                chunks = sum(reply.chunks for reply in replies)
                costs.append(1e3 * cpu / chunks)
    print(f"streams: {chunks / 64:.0f} chunks each; {served.ended}")
    result("gateway.stream_cpu_ms_per_chunk", statistics.median(costs), "ms")


async def many_streams() -> None:
    """Memory with `STREAMS` streams open, a token a second each, prompts of 2,000 tokens."""
    options = Options(ANSWER, STREAMS, interval_s=1.0)
    with fulmen(options) as served:
        idle = served.memory_mb()
        clients = [await served.connect(number) for number in range(STREAMS)]
        asked = [
            asyncio.create_task(
                client.post(body(served, [question(number, 40)], stream=True)),
            )
            for number, client in enumerate(clients)
        ]
        # All deliver: the head and the role have come, and two tokens after them.
        while not all(client.reads >= 4 for client in clients):
            await asyncio.sleep(0.5)
            if any(task.done() for task in asked):
                raise SystemExit("a stream ended before all were under way")
        memory = served.memory_mb()
        replies = [checked(reply) for reply in await asyncio.gather(*asked)]
    whole = sum(reply.body.endswith(b"0\r\n\r\n") and b"[DONE]" in reply.body for reply in replies)
    print(f"{STREAMS} streams: {whole} whole, {idle:.0f} MB before; {served.ended}")
    if whole < STREAMS:
        raise SystemExit("a stream was cut off")
    result(f"gateway.streams_{STREAMS}.mb", memory, "MB")


async def main(peers: dict[str, str]) -> None:
    os.sched_setaffinity(0, {OTHER_CORE})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    await added_latency()
    await stream_cost()
    await many_streams()
    await calls_and_cpu(peers)


if __name__ == "__main__":
    asyncio.run(main(dict(pair.split("=", 1) for pair in sys.argv[1:])))
