"""What the two ends of a remote engine say to each other, as frames of msgpack.

The near end (`remote.py`) asks, the far end (`pytorch/serving.py`) samples. Several engines share a
socket; requests are told apart by a ticket that the near end gives them.
"""

import pickle
from typing import TypeAlias

import msgspec

from fulmen.engine.base import Delta, EngineInfo, GenerateRequest
from fulmen.schema.errors import FulmenError
from fulmen.schema.frames import framed
from fulmen.schema.records import Record


class Served(Record, frozen=True, kw_only=True):
    """An engine of the far end, as it is when the two meet."""

    info: EngineInfo
    version: int


class Generate(Record, frozen=True, kw_only=True, tag="generate"):
    """Sample a completion."""

    ticket: int
    engine: str
    """Name of the policy that it serves."""
    request: GenerateRequest


class Abort(Record, frozen=True, kw_only=True, tag="abort"):
    """Nobody waits for a completion any more."""

    ticket: int


class Sampled(Record, frozen=True, kw_only=True, tag="sampled"):
    """Tokens; the last of a ticket has a finish reason."""

    ticket: int
    delta: Delta


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """The end of a ticket."""

    ticket: int
    error: bytes
    """A pickled FulmenError: both ends are one program."""


class Published(Record, frozen=True, kw_only=True, tag="published"):
    """What an engine samples from here on is of this version."""

    engine: str
    version: int


Asked: TypeAlias = Generate | Abort
Told: TypeAlias = Sampled | Failed | Published

_ENCODER = msgspec.msgpack.Encoder()
_ASKED = msgspec.msgpack.Decoder(Asked)
_TOLD = msgspec.msgpack.Decoder(list[Told])


def asking(message: Asked) -> bytes:
    """A frame for the far end."""
    return framed(_ENCODER.encode(message))


def telling(messages: list[Told]) -> bytes:
    """A frame for the near end: all that one step of sampling brought."""
    return framed(_ENCODER.encode(messages))


def asked(data: bytes) -> Asked:
    """What a frame of `asking` holds."""
    return _ASKED.decode(data)


def told(data: bytes) -> list[Told]:
    """What a frame of `telling` holds."""
    return _TOLD.decode(data)


def failed(ticket: int, error: FulmenError) -> Failed:
    """An error as a message."""
    return Failed(ticket=ticket, error=pickle.dumps(error))


def error_of(message: Failed) -> FulmenError:
    """The error again.

    >>> str(error_of(failed(1, FulmenError("no", hint="yes"))))
    'no; yes'
    """
    return pickle.loads(message.error)  # noqa: S301 - written by our own process
