"""A line that breaks: a TCP proxy that drops connections, and goes dead, at moments of chance.

While it is dead nothing passes, and nothing tells of it: for shorter than a lease, mostly, and for
longer, sometimes.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from random import Random

from crash.scene import Scene

_BETWEEN_S = 1.0
"""Mean time between two troubles."""


class Line:
    """Passes on what comes, unless it does not."""

    def __init__(self, port: int) -> None:
        """Leads to this port."""
        self._port = port
        self._alive = asyncio.Event()
        self._alive.set()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until an end of it is closed, or the line breaks."""
        try:
            onward = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, onward[1])
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._carry(reader, onward[1]), self._carry(onward[0], writer))
        finally:
            self._pairs.discard(pair)
            _break(pair)

    def cut(self, chance: Random | None = None) -> None:
        """Break all connections, or one."""
        pairs = list(self._pairs)
        for pair in [chance.choice(pairs)] if chance and pairs else pairs:
            _break(pair)

    async def die(self, seconds: float) -> None:
        """Let nothing pass for a while."""
        self._alive.clear()
        await asyncio.sleep(seconds)
        self._alive.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._alive.wait()
                writer.write(data)
                await writer.drain()
        if not writer.is_closing():
            with contextlib.suppress(OSError):
                writer.write_eof()


def _break(pair: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
    for writer in pair:
        writer.transport.abort()


async def break_often(scene: Scene, ready: Callable[[], None]) -> None:
    """Be the line of a run, until killed."""
    line, chance = Line(scene.port), scene.chance("line")
    # Not released and taken again: nobody else may get the port.
    listening = socket.create_server(("127.0.0.1", scene.line_port))
    async with await asyncio.start_server(line.accept, sock=listening):
        ready()
        while True:
            await asyncio.sleep(scene.slowness * chance.expovariate(1 / _BETWEEN_S))
            what = chance.random()
            if what < 0.6:
                line.cut(chance)
            elif what < 0.75:
                line.cut()
            else:
                await line.die(scene.lease_s * (0.3 if what < 0.92 else 1.6))
            print(f"{what:.2f}", flush=True)
