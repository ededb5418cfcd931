"""What the pool and its worker processes say to each other: frames of JSON over two sockets.

Orders go one way, reports the other. A worker sends a report from whatever thread has it, at once:
what it said before it was killed has been said.
"""

import asyncio
import os
import socket
import threading
from typing import TypeAlias

import msgspec

from fulmen.runner.agents import AgentSpec
from fulmen.schema.frames import framed, next_frame
from fulmen.schema.records import JSON, Outcome, Record, Reward, Span

MOST_BYTES = 2**26
"""Of a message."""


class Setup(Record, frozen=True, kw_only=True, tag="setup"):
    """First message to a worker."""

    agent: AgentSpec
    gateway: str
    """Base URL without a path."""
    capacity: int
    """How many attempts it may be given at once."""
    tracing: bool = True
    """Watch the agent's framework."""


class Start(Record, frozen=True, kw_only=True, tag="start"):
    """Run one attempt."""

    ticket: int
    """Names the attempt between pool and worker."""
    rollout_id: str
    attempt: int
    key: str
    input: JSON
    deadline_s: float
    """It is stopped after so long, seconds."""


class Stop(Record, frozen=True, kw_only=True, tag="stop"):
    """End an attempt; it answers with Ended all the same."""

    ticket: int


class Ready(Record, frozen=True, kw_only=True, tag="ready"):
    """The agent is imported; or why it cannot be."""

    error: str = ""


class Seen(Record, frozen=True, kw_only=True, tag="seen"):
    """A span began or ended."""

    span: Span


class Rewarded(Record, frozen=True, kw_only=True, tag="rewarded"):
    """The agent gave a reward."""

    reward: Reward


class Hint(Record, frozen=True, kw_only=True, tag="hint"):
    """Something that the user may want to know."""

    text: str


class Ended(Record, frozen=True, kw_only=True, tag="ended"):
    """An attempt came to its end."""

    ticket: int
    outcome: Outcome
    stopped: bool = False
    """Not by itself, but after it was told to."""
    stuck: bool = False
    """Its thread goes on all the same, until `Freed` is told."""


class Freed(Record, frozen=True, kw_only=True, tag="freed"):
    """A thread that had gone on after the end of its attempt has come to its own."""

    ticket: int


ToWorker: TypeAlias = Setup | Start | Stop
FromWorker: TypeAlias = Ready | Seen | Rewarded | Hint | Ended | Freed

# JSON, because tasks and answers are: msgpack has no integers beyond 64 bits.
_ENCODER = msgspec.json.Encoder()
_TO_WORKER = msgspec.json.Decoder(ToWorker)
_FROM_WORKER = msgspec.json.Decoder(FromWorker)


def send(writer: asyncio.StreamWriter, order: ToWorker) -> None:
    """Queue an order."""
    writer.write(framed(_ENCODER.encode(order)))


class Reports:
    """The worker's side of the socket that its reports go through."""

    def __init__(self, connection: socket.socket) -> None:
        """The socket has to be a blocking one: a slow pool slows its workers down."""
        self._connection: socket.socket | None = connection
        self._turn = threading.Lock()
        # A copy of the process would break into the middle of our reports with its own.
        os.register_at_fork(after_in_child=self._silence)

    def send(self, report: FromWorker) -> None:
        """Hand a report to the kernel; nothing happens if the pool is gone, or in a fork.

        Raises:
            TypeError, ValueError, OverflowError: the report cannot be written as JSON.
        """
        data = framed(_ENCODER.encode(report))
        with self._turn:
            try:
                if self._connection is not None:
                    self._connection.sendall(data)
            except OSError:
                return

    def _silence(self) -> None:
        self._connection, self._turn = None, threading.Lock()


async def receive_order(reader: asyncio.StreamReader) -> ToWorker | None:
    """The pool's next message; None when the pool is gone."""
    data = await next_frame(reader)
    return None if data is None else _TO_WORKER.decode(data)


async def receive_report(reader: asyncio.StreamReader) -> FromWorker | None:
    """The worker's next message; None when the worker is gone."""
    data = await next_frame(reader)
    return None if data is None else _FROM_WORKER.decode(data)
