"""OpenAI's completions: a body, read."""

from fulmen.gateway import fields
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.fields import Body
from fulmen.gateway.request import ModelRequest
from fulmen.schema.records import JSON

_DEFAULT_TOKENS = 16
"""What a client gets that does not say how much it wants; so the protocol has it."""
_MOST_PROMPTS = 128


def read_request(body: JSON) -> ModelRequest:
    """Check a decoded body.

    Raises:
        RequestRefused: what is wrong, naming the parameter.
    """
    body = fields.body_object(body)
    n = fields.integer(body, "n", low=1, high=128) or 1
    fields.refuse(body, "suffix", "echo", *fields.OTHER_SAMPLING)
    if fields.integer(body, "best_of", low=1) not in (None, n):
        raise RequestRefused("best_of must be equal to n", param="best_of")
    logprobs = fields.integer(body, "logprobs", low=0, high=20)
    maximum = fields.integer(body, "max_tokens", low=1)
    return ModelRequest(
        protocol="completions",
        body=body,
        model=fields.required_string(body, "model"),
        prompts=_prompts(body),
        n=n,
        stop=fields.strings(body, "stop"),
        max_tokens=_DEFAULT_TOKENS if maximum is None else maximum,
        temperature=fields.number(body, "temperature", low=0, high=2),
        top_p=fields.number(body, "top_p", low=1e-6, high=1),
        seed=fields.integer(body, "seed"),
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
        stream=fields.flag(body, "stream"),
    )


def _prompts(body: Body) -> tuple[str | tuple[int, ...], ...]:
    """One text, one list of tokens, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(map(_is_token, prompt)):
            return (tuple(prompt),)
        if len(prompt) > _MOST_PROMPTS:
            raise RequestRefused(f"more than {_MOST_PROMPTS} prompts", param="prompt")
        if all(isinstance(one, str) for one in prompt):
            return tuple(prompt)
        if all(isinstance(one, list) and all(map(_is_token, one)) for one in prompt):
            return tuple(tuple(one) for one in prompt)
    raise RequestRefused("prompt must be text, tokens, or a list of either", param="prompt")


def _is_token(value: JSON) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
