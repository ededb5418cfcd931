"""A request that cannot be served, before any protocol has put it into its own words."""

from dataclasses import dataclass

import orjson
from starlette.responses import Response

from fulmen.schema.errors import FulmenError, LeaseLost
from fulmen.schema.records import JSON


@dataclass(eq=False)
class RequestRefused(Exception):
    """A request that is answered with an error object, in the form of its protocol."""

    message: str
    status: int = 400
    param: str | None = None
    """The field that is wrong, as a path: `messages[2].content`."""
    code: str | None = None
    """OpenAI's word for the error, where clients act on it."""
    retry_after_s: int | None = None
    """When it makes sense to ask again, seconds."""

    def __str__(self) -> str:
        return self.message

    def response(self, body: JSON) -> Response:
        """As HTTP, with the body that the protocol gives it."""
        headers = {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return json_response(body, self.status, headers)


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(body), status, headers, "application/json")


def server_failed(error: FulmenError) -> RequestRefused:
    """The engine's or the store's failure, told to the client: it may try again, the rollout
    will. One whose attempt has ended may not."""
    if isinstance(error, LeaseLost):
        return RequestRefused(str(error), status=403, code="attempt_ended")
    return RequestRefused(str(error), status=500, retry_after_s=1)


def openai_error(refusal: RequestRefused) -> dict[str, JSON]:
    """OpenAI's error object.

    >>> openai_error(RequestRefused("n must be an integer", param="n"))["error"]["param"]
    'n'
    """
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": refusal.message,
            "type": kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }
