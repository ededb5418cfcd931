"""What the pool and its worker processes say to each other: msgpack frames over a socket pair."""

import asyncio
import struct
from typing import TypeAlias

import msgspec

from fulmen.runner.agents import AgentSpec
from fulmen.schema.records import JSON, Outcome, Record

_LENGTH = struct.Struct("<I")


class Setup(Record, frozen=True, kw_only=True, tag="setup"):
    """First message to a worker."""

    agent: AgentSpec
    gateway: str
    """Base URL without a path."""
    capacity: int
    """How many attempts it may be given at once."""


class Start(Record, frozen=True, kw_only=True, tag="start"):
    """Run one attempt."""

    ticket: int
    """Names the attempt between pool and worker."""
    rollout_id: str
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


class Ended(Record, frozen=True, kw_only=True, tag="ended"):
    """An attempt came to its end."""

    ticket: int
    outcome: Outcome


ToWorker: TypeAlias = Setup | Start | Stop
FromWorker: TypeAlias = Ready | Ended

_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER = msgspec.msgpack.Decoder(FromWorker)


def send(writer: asyncio.StreamWriter, message: ToWorker | FromWorker) -> None:
    """Queue a message."""
    data = _ENCODER.encode(message)
    writer.write(_LENGTH.pack(len(data)) + data)


async def receive_order(reader: asyncio.StreamReader) -> ToWorker | None:
    """The pool's next message; None when the pool is gone."""
    data = await _frame(reader)
    return None if data is None else _TO_WORKER.decode(data)


async def receive_report(reader: asyncio.StreamReader) -> FromWorker | None:
    """The worker's next message; None when the worker is gone."""
    data = await _frame(reader)
    return None if data is None else _FROM_WORKER.decode(data)


async def _frame(reader: asyncio.StreamReader) -> bytes | None:
    try:
        head = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_LENGTH.unpack(head)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
