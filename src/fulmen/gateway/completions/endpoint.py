"""`/v1/completions`."""

from collections.abc import AsyncGenerator

from fulmen.gateway.attempt import Attempt
from fulmen.gateway.completions.read import read_request
from fulmen.gateway.completions.write import completion_body, events
from fulmen.gateway.errors import RequestRefused, openai_error
from fulmen.gateway.exchange import Exchange
from fulmen.gateway.request import ModelRequest
from fulmen.schema.records import JSON


class Completions:
    """OpenAI's completions of raw prompts."""

    path = "/completions"
    prefix = "cmpl-"

    def read(self, body: JSON, attempt: Attempt) -> ModelRequest:  # noqa: ARG002 - stateless
        """See `Endpoint.read`."""
        return read_request(body)

    def answer(self, exchange: Exchange) -> JSON:
        """See `Endpoint.answer`."""
        return completion_body(exchange)

    def events(self, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """See `Endpoint.events`."""
        return events(exchange)

    def error(self, refusal: RequestRefused) -> dict[str, JSON]:
        """See `Endpoint.error`."""
        return openai_error(refusal)
