"""One HTTP application on one socket, inside the event loop of the run."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from fulmen.schema.errors import ConfigError, FulmenError


class _Quiet(uvicorn.Server):
    """A uvicorn server that leaves signals to whoever runs the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ctrl-C belongs to the run, which has a checkpoint to write first."""
        yield


class Listening:
    """`async with Listening(app, host, port) as server:` accepts requests inside the block."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._socket = _bind(host, port)
        self.host, self.port = host, self._socket.getsockname()[1]
        # h11 keep-alive longer than any pause between two calls of an agent, so that clients do not
        # meet a connection that is closed under them.
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            timeout_keep_alive=600,
            timeout_graceful_shutdown=2,
            lifespan="off",
        )
        self._server = _Quiet(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL without a path, for this machine."""
        return _url(_LOOPBACK.get(self.host, self.host), self.port)

    @property
    def url_elsewhere(self) -> str:
        """The same for other machines, if they are let in: with this one's name."""
        return _url(socket.gethostname() if self.host in _LOOPBACK else self.host, self.port)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                raise FulmenError(f"the HTTP server on {self.url} did not start")
            await asyncio.sleep(0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - named, not bound
"""Every address of a machine, and the one that it has for itself."""


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol spelled out: only then asyncio sets TCP_NODELAY on accepted connections, and
    # without it every second answer waits 40 ms for the acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or "unknown reason").lower()
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({reason})",
            hint="choose another --port, or 0 for a free one",
        ) from None
    listener.listen(1024)
    listener.setblocking(False)
    return listener
