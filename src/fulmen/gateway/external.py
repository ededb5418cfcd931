"""Models that are somewhere else: a request goes there as it came, and its answer is recorded.

An agent may use a frozen model for some of its calls (a judge, a planner, a bigger model). Nothing
of it is trained: there are no tokens and no log-probabilities of a policy of ours.
"""

import functools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import httpx
import orjson
from starlette.requests import Request
from starlette.responses import Response

from fulmen.gateway import ids
from fulmen.gateway.arrival import Arrival
from fulmen.gateway.body import ReadBody
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.exchange import Recorder
from fulmen.gateway.stream import EventStream
from fulmen.schema.records import JSON, Call

_KEPT_BYTES = 4 * 2**20
"""Of a streamed answer, for the record."""
_FORWARDED = ("anthropic-version", "anthropic-beta", "openai-beta", "accept")


@dataclass(frozen=True, slots=True)
class External:
    """An endpoint that speaks the protocol it is asked in."""

    name: str
    """Its name here."""
    base_url: str
    """With `/v1`, where its paths have one."""
    model: str
    """Its name there."""
    api_key: str = field(default="", repr=False)
    timeout_s: float = 600.0


class Forwarding:
    """Sends requests on. One client for all, so that connections are kept."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._clients: list[httpx.AsyncClient] = []

    async def aclose(self) -> None:
        """End all connections."""
        for client in self._clients:
            await client.aclose()

    @functools.cached_property
    def _client(self) -> httpx.AsyncClient:
        """Made when first needed: reading the certificates takes tens of milliseconds."""
        client = httpx.AsyncClient(follow_redirects=False)
        self._clients.append(client)
        return client

    async def forward(
        self,
        request: Request,
        body: ReadBody,
        target: External,
        *,
        path: str,
        arrival: Arrival,
    ) -> Response:
        """Send a request to where its model is, and its answer back.

        Raises:
            RequestRefused: 502 if it cannot be reached.
        """
        if not isinstance(body.value, dict):
            raise RequestRefused("the body must be a JSON object")
        wanted = {**body.value, "model": target.model}
        outgoing = self._client.build_request(
            "POST",
            target.base_url.rstrip("/") + path,
            content=orjson.dumps(wanted),
            headers=_headers(request.headers, target),
            timeout=target.timeout_s,
        )
        record = _Record(arrival, path, target.name, body.value)
        try:
            answer = await self._client.send(outgoing, stream=True)
        except httpx.HTTPError as error:
            raise RequestRefused(
                f"the model {target.model!r} cannot be reached ({type(error).__name__})",
                status=502,
                retry_after_s=2,
            ) from None
        kind = answer.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            return EventStream(self._relay(answer, record))
        content = await answer.aread()
        await self._recorder.record_calls([record.call(content, answer.status_code)])
        headers = {k: v for k, v in answer.headers.items() if k == "retry-after"}
        return Response(content, answer.status_code, headers, kind or None)

    async def _relay(
        self, answer: httpx.Response, record: "_Record"
    ) -> AsyncGenerator[bytes, None]:
        kept = bytearray()
        try:
            async for part in answer.aiter_bytes():
                kept += part[: _KEPT_BYTES - len(kept)]
                yield part
        finally:
            await answer.aclose()
            await self._recorder.record_calls([record.call(bytes(kept), answer.status_code)])


@dataclass(frozen=True, slots=True)
class _Record:
    arrival: Arrival
    path: str
    model: str
    body: Mapping[str, JSON]

    def call(self, content: bytes, status: int) -> Call:
        """A call without tokens, which nothing can train on."""
        try:
            response = orjson.loads(content)
        except orjson.JSONDecodeError:
            response = {"text": content.decode(errors="replace")}
        return self.arrival.call(
            _id_of(response) or f"ext_{ids.mint()}",
            self.path,
            request=dict(self.body),
            response=response,
            status=status,
            policy=self.model,
        )


def _id_of(response: JSON) -> str | None:
    name = response.get("id") if isinstance(response, dict) else None
    return name if isinstance(name, str) else None


def _headers(given: Mapping[str, str], target: External) -> dict[str, str]:
    headers = {name: given[name] for name in _FORWARDED if name in given}
    headers["content-type"] = "application/json"
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
        if "anthropic-version" in given:
            headers["x-api-key"] = target.api_key
    return headers
