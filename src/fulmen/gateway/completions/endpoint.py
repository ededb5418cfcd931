"""`/v1/completions`: OpenAI's completions of raw prompts."""

from fulmen.gateway.completions.read import read_request
from fulmen.gateway.completions.write import completion_body, events
from fulmen.gateway.endpoint import Stateless
from fulmen.gateway.errors import openai_error

COMPLETIONS = Stateless(
    "/completions", "cmpl-", read_request, completion_body, events, openai_error
)
