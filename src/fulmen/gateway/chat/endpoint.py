"""`/v1/chat/completions`: OpenAI's chat completions."""

from fulmen.gateway.chat.read import read_request
from fulmen.gateway.chat.write import completion_body, events
from fulmen.gateway.endpoint import Stateless
from fulmen.gateway.errors import openai_error

CHAT = Stateless(
    "/chat/completions", "chatcmpl-", read_request, completion_body, events, openai_error
)
