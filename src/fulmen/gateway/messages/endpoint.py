"""`/v1/messages`."""

from collections.abc import AsyncGenerator

from fulmen.gateway.attempt import Attempt
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.exchange import Exchange, render
from fulmen.gateway.messages.error import anthropic_error
from fulmen.gateway.messages.read import read_request
from fulmen.gateway.messages.write import events, message_body
from fulmen.gateway.models import Models
from fulmen.gateway.request import ModelRequest
from fulmen.schema.records import JSON


class Messages:
    """Anthropic's messages."""

    path = "/messages"
    prefix = "msg_"

    def read(self, body: JSON, attempt: Attempt) -> ModelRequest:  # noqa: ARG002 - stateless
        """See `Endpoint.read`."""
        return read_request(body)

    def answer(self, exchange: Exchange) -> JSON:
        """See `Endpoint.answer`."""
        return message_body(exchange)

    def events(self, exchange: Exchange) -> AsyncGenerator[bytes, None]:
        """See `Endpoint.events`."""
        return events(exchange)

    def error(self, refusal: RequestRefused) -> dict[str, JSON]:
        """See `Endpoint.error`."""
        return anthropic_error(refusal)


def count_tokens(body: JSON, attempt: Attempt, models: Models) -> JSON:
    """Body of `/v1/messages/count_tokens`. Raises RequestRefused as a request would."""
    asked = read_request(body, count=True)
    (prompt,) = render(asked, attempt, models.policy(asked.model).renderer)
    return {"input_tokens": len(prompt.ids)}
