"""`/v1/messages`: Anthropic's messages."""

from fulmen.gateway.attempt import Attempt
from fulmen.gateway.endpoint import Stateless
from fulmen.gateway.exchange import render
from fulmen.gateway.messages.error import anthropic_error
from fulmen.gateway.messages.read import read_request
from fulmen.gateway.messages.write import events, message_body
from fulmen.gateway.models import Models
from fulmen.schema.records import JSON

MESSAGES = Stateless("/messages", "msg_", read_request, message_body, events, anthropic_error)


def count_tokens(body: JSON, attempt: Attempt, models: Models, agent: str = "") -> JSON:
    """Body of `/v1/messages/count_tokens`. Raises RequestRefused as a request would."""
    asked = read_request(body, count=True)
    (prompt,) = render(asked, attempt, models.policy(asked.model, agent))
    return {"input_tokens": len(prompt.ids)}
