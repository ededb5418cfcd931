"""Anthropic's error object."""

from fulmen.gateway.errors import RequestRefused
from fulmen.schema.records import JSON

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

NO_THREADS = "thread_unsupported_request"
"""Tells clients that the server keeps no conversation for them, so that they send all of it."""


def anthropic_error(refusal: RequestRefused) -> dict[str, JSON]:
    """Its body.

    >>> anthropic_error(RequestRefused("no", status=404))["error"]
    {'type': 'not_found_error', 'message': 'no'}
    """
    kind = "api_error" if refusal.status >= 500 else "invalid_request_error"
    message = refusal.message
    if refusal.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # the words that clients look for
    error: dict[str, JSON] = {"type": _KINDS.get(refusal.status, kind), "message": message}
    if refusal.code == NO_THREADS:
        error["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": error, "request_id": None}
