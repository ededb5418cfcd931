"""Records with any JSON in them as msgpack, and back: what processes tell each other over HTTP.

msgpack has no integers beyond 64 bits and no lone surrogates. JSON has, and so have outputs of
agents. A value like that travels as an extension that holds its JSON text.
"""

import json

import msgspec
from msgspec import structs

from fulmen.schema.errors import DataError

_JSON_TEXT = 1
"""Code of the extension."""

_encoder = msgspec.msgpack.Encoder()


def pack(value: object, owner: str) -> bytes:
    """A record, or lists and tuples of records, as msgpack.

    Raises:
        DataError: something in it is no JSON; `owner` ("the outcome of …") begins the message.

    >>> unpack_json(pack({"big": 10**30}, "a number"))
    {'big': 1000000000000000000000000000000}
    """
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass  # seldom, and worth a second look
    try:
        return _encoder.encode(_spelled_out(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{owner} holds what is no JSON: {error}",
            hint="use only dict, list, str, int, float, bool and None",
        ) from error


def unpack_json(data: bytes) -> object:
    """Plain values out of what `pack` made; raises DataError."""
    try:
        return _PLAIN.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DataError(f"not msgpack: {error}") from error


def text_of_extension(code: int, data: memoryview) -> object:
    """To be a decoder's `ext_hook`: the value whose JSON text an extension holds."""
    if code != _JSON_TEXT:
        raise ValueError(f"an extension of kind {code}, which nobody sends")
    return json.loads(bytes(data))


def _spelled_out(value: object) -> object:
    """The same, with what msgpack cannot hold as extensions."""
    if isinstance(value, msgspec.Struct):
        changed = {name: _spelled_out(getattr(value, name)) for name in value.__struct_fields__}
        return structs.replace(value, **changed)
    if isinstance(value, list | tuple):
        return [_spelled_out(item) for item in value]
    if isinstance(value, dict):
        try:
            _encoder.encode(list(value))
        except (ValueError, OverflowError):
            return _as_text(value)
        return {key: _spelled_out(item) for key, item in value.items()}
    try:
        _encoder.encode(value)
    except (ValueError, OverflowError):
        return _as_text(value)
    return value


def _as_text(value: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_JSON_TEXT, json.dumps(value).encode())


_PLAIN = msgspec.msgpack.Decoder(ext_hook=text_of_extension)
