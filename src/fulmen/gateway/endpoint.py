"""What a protocol is to the gateway: a way to read requests and to write answers."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from fulmen.gateway.attempt import Attempt
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.exchange import Exchange
from fulmen.gateway.request import ModelRequest
from fulmen.schema.records import JSON


class Endpoint(Protocol):
    """One path that a client asks for completions at."""

    @property
    def path(self) -> str:
        """Behind `/v1`."""
        ...

    @property
    def prefix(self) -> str:
        """Begins every response's id."""
        ...

    def read(self, body: JSON, attempt: Attempt, /) -> ModelRequest:
        """Check a decoded body.

        Raises:
            RequestRefused: what is wrong, naming the parameter.
        """
        ...

    def answer(self, exchange: Exchange, /) -> JSON:
        """The body of a finished exchange."""
        ...

    def events(self, exchange: Exchange, /) -> AsyncGenerator[bytes, None]:
        """Serve the exchange as server-sent events, errors of the engine included."""
        ...

    def error(self, refusal: RequestRefused, /) -> dict[str, JSON]:
        """The body that says why a request is not served."""
        ...


@dataclass(frozen=True, slots=True)
class Stateless:
    """An endpoint whose requests say everything themselves."""

    path: str
    prefix: str
    parse: Callable[[JSON], ModelRequest]
    answer: Callable[[Exchange], JSON]
    events: Callable[[Exchange], AsyncGenerator[bytes, None]]
    error: Callable[[RequestRefused], dict[str, JSON]]

    def read(self, body: JSON, attempt: Attempt) -> ModelRequest:  # noqa: ARG002 - part of Endpoint
        """See `Endpoint.read`."""
        return self.parse(body)
