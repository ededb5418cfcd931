"""The HTTP face of the gateway: routes, and a request's way through them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fulmen.gateway import ids
from fulmen.gateway.access import claims_of
from fulmen.gateway.arrival import Arrival, arrival_of
from fulmen.gateway.attempt import Attempt, Attempts
from fulmen.gateway.body import ReadBody, read_body
from fulmen.gateway.chat.endpoint import CHAT
from fulmen.gateway.completions.endpoint import COMPLETIONS
from fulmen.gateway.endpoint import Endpoint
from fulmen.gateway.errors import RequestRefused, json_response, openai_error, server_failed
from fulmen.gateway.exchange import Exchange, Recorder
from fulmen.gateway.external import Forwarding
from fulmen.gateway.gate import Gate, patience
from fulmen.gateway.messages.endpoint import MESSAGES, count_tokens
from fulmen.gateway.messages.error import anthropic_error
from fulmen.gateway.models import Models
from fulmen.gateway.openapi import description
from fulmen.gateway.responses.endpoint import Responses, stored_response
from fulmen.gateway.stream import EventStream
from fulmen.schema.errors import FulmenError
from fulmen.schema.headers import AGENT, read_agent
from fulmen.schema.keys import KeyClaims
from fulmen.schema.records import JSON

ENDPOINTS: tuple[Endpoint, ...] = (CHAT, COMPLETIONS, MESSAGES, Responses())
ROOTS = ("/v1", "/key/{key}/v1")
"""Base URLs: the key as the API key, or in the path."""


_Handler = Callable[[Request, KeyClaims], Awaitable[Response]]
_ErrorForm = Callable[[RequestRefused], dict[str, JSON]]


class Gateway:
    """An agent's only view of the policy."""

    def __init__(self, models: Models, recorder: Recorder, secret: bytes) -> None:
        self._models = models
        self._recorder = recorder
        self._secret = secret
        self._attempts = Attempts()
        self._gate = Gate()
        self._forwarding = Forwarding(recorder)

    def routes(self) -> list[Route]:
        """To be mounted by the server."""
        samples = [(one.path, "POST", self._serving(one), one.error) for one in ENDPOINTS]
        asks = [
            ("/messages/count_tokens", "POST", self._count_tokens, anthropic_error),
            ("/responses/{name}", "GET", self._response, openai_error),
            ("/responses/{name}", "DELETE", self._delete_response, openai_error),
            ("/models", "GET", self._list_models, None),
            ("/models/{name:path}", "GET", self._model, None),
        ]
        described = Route("/v1/openapi.json", _described, methods=["GET"])
        return [described] + [
            Route(root + path, self._for_key_holders(handle, error), methods=[method])
            for root in ROOTS
            for path, method, handle, error in samples + asks
        ]

    def forget(self, rollout_id: str, attempt: int) -> None:
        """An attempt has ended: what it is asking for is stopped at the next token, what it asks
        from now on is refused, and what was remembered of it is dropped. From any thread."""
        self._attempts.end(rollout_id, attempt)

    def hold(self) -> AbstractAsyncContextManager[None]:
        """New requests wait while the context is open; nobody sees an error."""
        return self._gate.hold()

    async def aclose(self) -> None:
        """End connections to models elsewhere."""
        await self._forwarding.aclose()

    def _for_key_holders(
        self, handle: _Handler, error_form: _ErrorForm | None
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that needs a key, and says what is wrong in the words of its protocol."""

        async def answer(request: Request) -> Response:
            form = error_form or _error_form(request)
            try:
                return await handle(request, claims_of(request, self._secret))
            except RequestRefused as refusal:
                return refusal.response(form(refusal))
            except FulmenError as error:
                refusal = server_failed(error)
                return refusal.response(form(refusal))

        return answer

    def _serving(self, endpoint: Endpoint) -> _Handler:
        async def serve(request: Request, claims: KeyClaims) -> Response:
            return await self._serve(endpoint, request, claims)

        return serve

    async def _serve(self, endpoint: Endpoint, request: Request, claims: KeyClaims) -> Response:
        body = await read_body(request)
        attempt = self._attempts.of(claims)
        arrival = arrival_of(request.headers, claims, attempt.next_index())
        try:
            with attempt.asking():
                return await self._answer(endpoint, request, body, arrival, attempt)
        except RequestRefused as refusal:
            if refusal.status != 503:  # held too long: the client comes again
                call = arrival.call(
                    ids.call_id(endpoint.prefix, ids.mint(), 0),
                    endpoint.path,
                    request=body.value,
                    response=endpoint.error(refusal),
                    status=refusal.status,
                )
                await self._recorder.record_calls([call])
            raise

    async def _answer(
        self,
        endpoint: Endpoint,
        request: Request,
        body: ReadBody,
        arrival: Arrival,
        attempt: Attempt,
    ) -> Response:
        claims, agent = arrival.claims, arrival.agent
        name = body.value.get("model") if isinstance(body.value, dict) else None
        if (external := self._models.external(name, agent)) is not None:
            return await self._forwarding.forward(
                request, body, external, path=endpoint.path, arrival=arrival
            )
        asked = endpoint.read(body.value, attempt)
        policy = self._models.policy(asked.model, agent)
        await self._gate.passed(patience(request.headers))
        await self._note_retry(request, body, attempt, claims)
        exchange = Exchange(
            asked,
            arrival,
            attempt,
            policy=policy,
            recorder=self._recorder,
            prefix=endpoint.prefix,
        )
        attempt.begin(body.digest, exchange.asked)
        headers = {"x-request-id": exchange.id, "request-id": exchange.id}
        if asked.stream:
            return EventStream(endpoint.events(exchange), headers)
        if not await _unless_disconnected(request, exchange):
            return Response(status_code=499)  # nobody reads it
        return json_response(endpoint.answer(exchange), headers=headers)

    async def _note_retry(
        self, request: Request, body: ReadBody, attempt: Attempt, claims: KeyClaims
    ) -> None:
        """A client that asks again has never seen the first answer."""
        if request.headers.get("x-stainless-retry-count", "0") == "0":
            return
        lost = attempt.retried(body.digest)
        if lost is not None:
            await self._recorder.supersede_calls(claims.rollout_id, claims.attempt, lost.call_ids)

    async def _count_tokens(self, request: Request, claims: KeyClaims) -> Response:
        body, attempt = await read_body(request), self._attempts.of(claims)
        agent = read_agent(request.headers.get(AGENT))
        return json_response(count_tokens(body.value, attempt, self._models, agent))

    async def _response(self, request: Request, claims: KeyClaims) -> Response:
        kept = stored_response(request.path_params["name"], self._attempts.of(claims))
        return json_response(kept.body)

    async def _delete_response(self, request: Request, claims: KeyClaims) -> Response:
        name, attempt = request.path_params["name"], self._attempts.of(claims)
        stored_response(name, attempt)
        del attempt.responses[name]
        return json_response({"id": name, "object": "response", "deleted": True})

    async def _list_models(self, request: Request, claims: KeyClaims) -> Response:  # noqa: ARG002
        names = self._models.names
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return json_response({"object": "list", "data": [_card(name) for name in names], **ends})

    async def _model(self, request: Request, claims: KeyClaims) -> Response:  # noqa: ARG002
        name = request.path_params["name"]
        if self._models.external(name) is None:
            self._models.policy(name)
        return json_response(_card(name))


async def _described(_: Request) -> Response:
    """Open to all: it says nothing about any rollout."""
    return json_response(description())


def _card(name: str) -> dict[str, JSON]:
    """A model as OpenAI and Anthropic list it: clients of either read the fields they know."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "fulmen",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


async def _unless_disconnected(request: Request, exchange: Exchange) -> bool:
    """Serve the exchange; a client that hangs up ends it at the next token, and gives False."""
    serving, left = asyncio.current_task(), False
    assert serving is not None

    async def watch() -> None:
        nonlocal left
        await request.receive()
        left = True
        exchange.attempt.lost(exchange.asked)
        serving.cancel()

    watching = asyncio.create_task(watch())
    try:
        await exchange.run()
    except asyncio.CancelledError:
        if not left:
            raise
        serving.uncancel()
    finally:
        watching.cancel()
    return not left


async def refuse(request: Request, error: Exception) -> Response:
    """Any other HTTP error of the application, as an error object."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = error.detail if isinstance(error, HTTPException) else "internal error"
    refusal = RequestRefused(text, status=status)
    return refusal.response(_error_form(request)(refusal))


def _error_form(request: Request) -> _ErrorForm:
    """The form of the protocol that a request seems to be of."""
    anthropic = "/messages" in request.url.path or "anthropic-version" in request.headers
    return anthropic_error if anthropic else openai_error
