"""Which attempt a request belongs to, and whether it may be served at all.

A rollout key is both. It comes as the API key (`Authorization: Bearer`, as OpenAI's clients send
it, or `x-api-key`, as some of Anthropic's do) or as a part of the path, for clients that can be
given a base URL and nothing else. Where several keys come, they must agree.
"""

from starlette.requests import Request

from fulmen.gateway.errors import RequestRefused
from fulmen.schema.keys import PREFIX, KeyClaims, KeyRefused, read_key


def claims_of(request: Request, secret: bytes) -> KeyClaims:
    """Check the keys of a request.

    Raises:
        RequestRefused: 401 without a valid key, 403 if two keys name different attempts.
    """
    keys = [key for key in _given(request) if key.startswith(PREFIX)]
    if not keys:
        raise _unauthorised(
            "it is not a rollout key; set OPENAI_API_KEY or ANTHROPIC_API_KEY to the key you were "
            "given"
        )
    claims = [_read(key, secret) for key in dict.fromkeys(keys)]
    named = {(claim.rollout_id, claim.attempt) for claim in claims}
    if len(named) > 1:
        raise RequestRefused(
            "the request carries the keys of different attempts: "
            + " and ".join(f"{rollout} (attempt {number})" for rollout, number in sorted(named)),
            status=403,
            code="attempt_mismatch",
        )
    return claims[0]


def _given(request: Request) -> list[str]:
    """Everything that may be a key: other clients' own keys are among it."""
    bearer = request.headers.get("authorization", "")
    return [
        request.path_params.get("key", ""),
        bearer[7:].strip() if bearer[:7].lower() == "bearer " else "",
        request.headers.get("x-api-key", "").strip(),
    ]


def _read(key: str, secret: bytes) -> KeyClaims:
    try:
        return read_key(key, secret)
    except KeyRefused as error:
        raise _unauthorised(f"{error}; use the key you were given") from None


def _unauthorised(reason: str) -> RequestRefused:
    """Begins with OpenAI's own words: some clients look for these, not for the status."""
    message = f"Incorrect API key provided: {reason}"
    return RequestRefused(message, status=401, code="invalid_api_key")
