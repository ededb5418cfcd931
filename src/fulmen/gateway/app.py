"""The HTTP face of the gateway: routes, keys, limits, streams."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fulmen.engine.base import Engine
from fulmen.gateway.chat import read_request
from fulmen.gateway.conversation import Conversation
from fulmen.gateway.errors import RequestRefused, json_response, server_failed
from fulmen.gateway.render import ChatRenderer
from fulmen.gateway.service import Exchange, Recorder
from fulmen.gateway.stream import EventStream
from fulmen.gateway.wire import completion_body, events
from fulmen.schema.errors import FulmenError
from fulmen.schema.keys import KeyClaims, KeyRefused, read_key
from fulmen.schema.records import JSON

_MOST_BYTES = 32 * 2**20
"""A body larger than this is refused."""
_MOST_CONVERSATIONS = 50_000
"""Attempts remembered at once; beyond it the oldest are forgotten and their next call is rendered
anew, which shows as drift."""


class Gateway:
    """An agent's only view of the policy."""

    def __init__(
        self, engine: Engine, renderer: ChatRenderer, recorder: Recorder, secret: bytes
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._recorder = recorder
        self._secret = secret
        self._conversations: OrderedDict[tuple[str, int], Conversation] = OrderedDict()
        self._holds = 0
        self._open = asyncio.Event()
        self._open.set()

    def routes(self) -> list[Route]:
        """To be mounted by the server."""
        return [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
        ]

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Drop what is remembered of an attempt that has ended."""
        self._conversations.pop((rollout_id, attempt), None)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """New requests wait while the context is open; nobody sees an error."""
        self._holds += 1
        self._open.clear()
        try:
            yield
        finally:
            self._holds -= 1
            if self._holds == 0:  # two may overlap
                self._open.set()

    async def _chat(self, request: Request) -> Response:
        try:
            claims = self._claims(request)
            chat = read_request(await _body(request))
            await self._open.wait()
            exchange = Exchange(
                chat,
                claims,
                self._conversation(claims),
                engine=self._engine,
                renderer=self._renderer,
                recorder=self._recorder,
            )
            if chat.stream:
                return EventStream(events(exchange))
            await _unless_disconnected(request, exchange)
            return json_response(completion_body(exchange))
        except RequestRefused as refusal:
            return refusal.response()
        except FulmenError as error:
            return server_failed(error).response()

    async def _models(self, request: Request) -> Response:
        try:
            self._claims(request)
        except RequestRefused as refusal:
            return refusal.response()
        return json_response({"object": "list", "data": [self._card(self._engine.info.model)]})

    async def _model(self, request: Request) -> Response:
        try:
            self._claims(request)
        except RequestRefused as refusal:
            return refusal.response()
        return json_response(self._card(request.path_params["name"]))

    def _card(self, name: str) -> dict[str, JSON]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "fulmen"}

    def _claims(self, request: Request) -> KeyClaims:
        given = request.headers.get("authorization", "")
        key = given[7:] if given[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        try:
            return read_key(key.strip(), self._secret)
        except KeyRefused as error:
            raise RequestRefused(
                f"{error}; set OPENAI_API_KEY to the key you were given",
                status=401,
                code="invalid_api_key",
            ) from None

    def _conversation(self, claims: KeyClaims) -> Conversation:
        key = (claims.rollout_id, claims.attempt)
        conversation = self._conversations.setdefault(key, Conversation())
        self._conversations.move_to_end(key)
        if len(self._conversations) > _MOST_CONVERSATIONS:
            self._conversations.popitem(last=False)
        return conversation


async def _body(request: Request) -> JSON:
    """The decoded body, read no further than the limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BYTES:
            raise RequestRefused(f"the body is larger than {_MOST_BYTES} bytes", status=413)
        parts.append(part)
    try:
        return orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not valid JSON ({error})") from None


async def _unless_disconnected(request: Request, exchange: Exchange) -> None:
    """Serve the exchange; a client that hangs up ends it at the next token."""
    serving = asyncio.ensure_future(exchange.run())
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:
        serving.cancel()
        leaving.cancel()


async def refuse(_: Request, error: Exception) -> Response:
    """Any other HTTP error of the application, as an error object."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = error.detail if isinstance(error, HTTPException) else "internal error"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return RequestRefused(text, status=status, kind=kind).response()
