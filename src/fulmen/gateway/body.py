"""Reading a request's body, no further than is allowed."""

from typing import NamedTuple

import orjson
from starlette.requests import ClientDisconnect, Request

from fulmen.gateway.attempt import digest
from fulmen.gateway.errors import RequestRefused
from fulmen.schema.records import JSON

MOST_BYTES = 32 * 2**20
"""A body larger than this is refused."""


class ReadBody(NamedTuple):
    """A decoded body, and the digest of what came over the wire."""

    value: JSON
    digest: bytes


async def read_body(request: Request) -> ReadBody:
    """Read and decode.

    Raises:
        RequestRefused: too large, or no JSON.
    """
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MOST_BYTES:
                raise RequestRefused(f"the body is larger than {MOST_BYTES} bytes", status=413)
            parts.append(part)
    except ClientDisconnect:
        raise RequestRefused("the client left before its request had come") from None
    raw = b"".join(parts)
    try:
        return ReadBody(orjson.loads(raw), digest(raw))
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not valid JSON ({error})") from None
