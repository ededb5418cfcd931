"""`/v1/responses`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fulmen.gateway import fields
from fulmen.gateway.attempt import Attempt, KeptResponse
from fulmen.gateway.errors import RequestRefused, openai_error
from fulmen.gateway.exchange import Exchange, assistant_message
from fulmen.gateway.request import ModelRequest
from fulmen.gateway.responses.read import is_stored, read_request
from fulmen.gateway.responses.stream import events
from fulmen.gateway.responses.write import response_body
from fulmen.schema.records import JSON


class Responses:
    """OpenAI's responses: stateful, for as long as the attempt lives."""

    path = "/responses"
    prefix = "resp_"

    def read(self, body: JSON, attempt: Attempt) -> ModelRequest:
        """See `Endpoint.read`."""
        return read_request(body, attempt)

    def answer(self, exchange: Exchange) -> JSON:
        """See `Endpoint.answer`."""
        _keep(exchange)
        return response_body(exchange)

    async def events(self, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """See `Endpoint.events`."""
        async with aclosing(events(exchange)) as made:
            async for one in made:
                if exchange.choices[0].finish_reason != "abort":
                    _keep(exchange)  # before the client learns that it may go on
                yield one

    def error(self, refusal: RequestRefused) -> dict[str, JSON]:
        """See `Endpoint.error`."""
        return openai_error(refusal)


def stored_response(name: str, attempt: Attempt) -> KeptResponse:
    """A response given out before. Raises RequestRefused if it is not there."""
    kept = attempt.responses.get(name)
    if kept is None:
        message = f"Response with id {name[:100]!r} not found."
        raise RequestRefused(message, status=404, param="response_id")
    return kept


def _keep(exchange: Exchange) -> None:
    """Remember an answer for the requests that refer to it."""
    request = exchange.request
    if exchange.id in exchange.attempt.responses or not is_stored(request.body):
        return
    own = 1 if fields.string(request.body, "instructions") else 0
    messages = (*request.messages[own:], assistant_message(exchange.choices[0]))
    exchange.attempt.responses[exchange.id] = KeptResponse(messages, response_body(exchange))
