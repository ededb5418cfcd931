"""`POST /v1/traces`: spans of an agent's own processes, in whatever language, over OTLP/HTTP.

A rollout key says which attempt they belong to; spans can carry no reward.
"""

import asyncio
import functools
import zlib
from collections.abc import Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fulmen.gateway.access import claims_of
from fulmen.gateway.errors import RequestRefused, json_response, openai_error
from fulmen.schema.errors import DataError
from fulmen.schema.records import Span
from fulmen.tracing.otlp import PROTOBUF, read_spans

MOST_BYTES = 16 * 2**20
"""Of a request, unpacked."""


class SpanKeeper(Protocol):
    """Where spans are kept."""

    async def record_spans(self, spans: Sequence[Span]) -> None:
        """Keep spans; raises StoreError if they cannot be."""
        ...


def traces_routes(keeper: SpanKeeper, secret: bytes) -> list[Route]:
    """To be mounted beside the gateway, at both of its roots."""

    async def take(request: Request) -> Response:
        try:
            claims = claims_of(request, secret)
            kind = request.headers.get("content-type", PROTOBUF)
            read = functools.partial(
                read_spans, rollout_id=claims.rollout_id, attempt=claims.attempt
            )
            # In a thread: a large batch takes longer than agents should wait for their answers.
            spans = await asyncio.to_thread(read, await _body(request), kind)
        except DataError as error:
            refusal = RequestRefused(str(error))
            return refusal.response(openai_error(refusal))
        except RequestRefused as refusal:
            return refusal.response(openai_error(refusal))
        await keeper.record_spans(spans)
        # An empty answer, in the form it was asked in, means that all were taken.
        return json_response({}) if "json" in kind else Response(media_type=PROTOBUF)

    paths = ("/v1/traces", "/key/{key}/v1/traces")
    return [Route(path, take, methods=["POST"]) for path in paths]


async def _body(request: Request) -> bytes:
    """The request's body, unpacked.

    Raises:
        DataError: it is too large, or not packed as it says.
    """
    packed = bytearray()
    async for part in request.stream():
        packed += part
        if len(packed) > MOST_BYTES:
            raise DataError(f"a request of more than {MOST_BYTES >> 20} MiB; send smaller batches")
    if request.headers.get("content-encoding", "identity") == "identity":
        return bytes(packed)
    unpacker = zlib.decompressobj(wbits=31)  # gzip's header
    try:
        body = unpacker.decompress(bytes(packed), MOST_BYTES)
    except zlib.error as error:
        raise DataError(f"not packed with gzip, the one encoding that is taken ({error})") from None
    if (not unpacker.eof and not unpacker.unconsumed_tail) or unpacker.unused_data:
        raise DataError("the gzip data is cut off, or goes on behind its end")
    if unpacker.unconsumed_tail:
        raise DataError(f"more than {MOST_BYTES >> 20} MiB unpacked; send smaller batches")
    return body
