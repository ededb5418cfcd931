"""`/v1/chat/completions`."""

from collections.abc import AsyncGenerator

from fulmen.gateway.attempt import Attempt
from fulmen.gateway.chat.read import read_request
from fulmen.gateway.chat.write import completion_body, events
from fulmen.gateway.errors import RequestRefused, openai_error
from fulmen.gateway.exchange import Exchange
from fulmen.gateway.request import ModelRequest
from fulmen.schema.records import JSON


class Chat:
    """OpenAI's chat completions."""

    path = "/chat/completions"
    prefix = "chatcmpl-"

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
