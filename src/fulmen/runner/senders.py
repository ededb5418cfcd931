"""Libraries that send HTTP, changed to sign what goes to the gateway.

`httpx` and `httpx2`, which the clients of OpenAI and Anthropic send with, and `http.client`, which
`urllib`, `urllib3` and `requests` do. A request that is signed has its own credentials replaced.
"""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Sign = Callable[[str | None, int | None], Mapping[str, str] | None]
"""Headers, by names in lower case, that a request to a host and port is to carry; None: leave it
alone. `x-api-key` is for requests that have such a header, and for no others."""

_ONLY_IN_PLACE = "x-api-key"


def change_httpx(library: ModuleType, *, sign: Sign) -> None:
    """Change the clients of `httpx`, or of a library like it."""

    def signed(send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def wrapper(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            for name, value in (sign(request.url.host, request.url.port) or {}).items():
                if name != _ONLY_IN_PLACE or name in request.headers:
                    request.headers[name] = value
            return send(client, request, *args, **kwargs)

        return wrapper

    for client in (library.Client, library.AsyncClient):
        client.send = signed(client.send)


def change_http_client(library: ModuleType, *, sign: Sign) -> None:
    """Change the connections of `http.client`, on which a request is put line by line."""
    connection = library.HTTPConnection
    begin, put, end = connection.putrequest, connection.putheader, connection.endheaders

    @functools.wraps(begin)
    def putrequest(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - a connection
        begin(self, *args, **kwargs)
        self._fulmen_due = dict(sign(self.host, self.port) or {})

    @functools.wraps(put)
    def putheader(self: Any, header: Any, *values: Any) -> None:  # noqa: ANN401 - text or bytes
        name = header if isinstance(header, str) else header.decode("latin-1")
        own = self.__dict__.get("_fulmen_due", {}).pop(name.lower(), None)
        put(self, header, *(values if own is None else (own,)))

    @functools.wraps(end)
    def endheaders(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - a connection
        due = self.__dict__.pop("_fulmen_due", {})
        for name, value in due.items():
            if name != _ONLY_IN_PLACE:
                put(self, name, value)
        end(self, *args, **kwargs)

    connection.putrequest, connection.putheader = putrequest, putheader
    connection.endheaders = endheaders
