"""Messages over a socket between two processes: four bytes of length, then as many bytes."""

import asyncio
import struct
from typing import BinaryIO

_LENGTH = struct.Struct("<I")


def framed(message: bytes) -> bytes:
    """A message as it is sent.

    >>> framed(b"hi")
    b'\\x02\\x00\\x00\\x00hi'
    """
    return _LENGTH.pack(len(message)) + message


async def next_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None when the other side is gone."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_LENGTH.unpack(head)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def read_frame(file: BinaryIO) -> bytes | None:
    """As `next_frame`, for a thread that has nothing else to do.

    >>> import io
    >>> read_frame(io.BytesIO(framed(b"hi"))), read_frame(io.BytesIO(b""))
    (b'hi', None)
    """
    try:
        head = file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        size = _LENGTH.unpack(head)[0]
        message = file.read(size)
    except ConnectionError:
        return None
    return message if len(message) == size else None
