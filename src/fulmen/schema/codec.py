"""Records to bytes and back: JSON for people and wires, msgpack for pipes, binary for tokens."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec
import numpy as np

from fulmen.schema.errors import DataError
from fulmen.schema.records import Record

R = TypeVar("R", bound=Record)

_JSON = msgspec.json.Encoder()
_MSGPACK = msgspec.msgpack.Encoder()


def to_json(record: Record) -> bytes:
    """Encode a record as one line of JSON."""
    return _JSON.encode(record)


def from_json(kind: type[R], data: bytes | str) -> R:
    """Decode and check a record.

    Raises:
        DataError: the data is no JSON, or a field is missing, unknown or of the wrong type.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise DataError(f"not a {kind.__name__}: {error}") from error


def to_msgpack(record: Record) -> bytes:
    """Encode a record compactly."""
    return _MSGPACK.encode(record)


def from_msgpack(kind: type[R], data: bytes) -> R:
    """Decode and check a record; raises DataError as `from_json` does."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise DataError(f"not a {kind.__name__}: {error}") from error


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32, four bytes each.

    >>> unpack_tokens(pack_tokens((1, 151_645)))
    (1, 151645)
    """
    return np.fromiter(ids, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`."""
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def pack_floats(values: Iterable[float]) -> bytes:
    """Numbers as little-endian float32: what the engine computed, in half of float64's space."""
    return np.fromiter(values, dtype="<f4").tobytes()


def unpack_floats(data: bytes) -> tuple[float, ...]:
    """The inverse of `pack_floats`, exact for values that came from float32."""
    return tuple(np.frombuffer(data, dtype="<f4").tolist())
