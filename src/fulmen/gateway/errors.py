"""Errors in the form that OpenAI's clients understand."""

from typing import Any

import orjson
from starlette.responses import Response

from fulmen.schema.errors import FulmenError


class RequestRefused(Exception):
    """A request that is answered with an error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }

    def response(self) -> Response:
        """As HTTP."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else None
        return json_response(self.body, self.status, headers)


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(body), status, headers, "application/json")


def server_failed(error: FulmenError) -> RequestRefused:
    """The engine's or the store's failure, told to the client: it may try again, the rollout
    will."""
    return RequestRefused(str(error), status=500, kind="server_error")
