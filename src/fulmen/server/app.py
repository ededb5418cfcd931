"""The HTTP application: the gateway, and a word that it is alive."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fulmen.gateway.app import Gateway, refuse


async def _health(_: Request) -> Response:
    return PlainTextResponse("ok\n")


def make_app(gateway: Gateway, others: Sequence[Route] = ()) -> Starlette:
    """Mount the gateway, and other routes before it; errors of any route have the form that
    OpenAI's clients expect."""
    return Starlette(
        routes=[Route("/health", _health), *others, *gateway.routes()],
        exception_handlers={HTTPException: refuse, Exception: refuse},
    )
