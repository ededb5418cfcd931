"""Which rollout a request belongs to, when many share one process.

The rollout key of the current attempt is a context variable. `httpx` and `httpx2`, which the
clients of OpenAI and Anthropic send with, are changed to put it on requests to the gateway, and on
no others. So a client made once, at import, still sends every rollout's own key.
"""

import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from fulmen.tracing.imports import after_import
from fulmen.tracing.stream import SpanStream

current_key: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "fulmen_rollout_key", default=None
)
"""The key of the attempt that the running code belongs to."""

_LIBRARIES = ("httpx", "httpx2")


def install(gateway: str, spans: SpanStream | None = None) -> None:
    """Attribute requests to the gateway (its base URL) from now on, in this process.

    With the spans of the agent's framework they also say which agent asks, and under which span.
    """
    parts = urlsplit(gateway)
    sign = functools.partial(_sign, host=parts.hostname, port=parts.port, spans=spans)
    after_import({name: functools.partial(_patch, sign=sign) for name in _LIBRARIES})
    _keep_context_in_threads()


def _sign(
    request: Any,  # noqa: ANN401 - httpx.Request
    *,
    host: str | None,
    port: int | None,
    spans: SpanStream | None,
) -> None:
    key = current_key.get()
    if key is None or (request.url.host, request.url.port) != (host, port):
        return
    request.headers["authorization"] = f"Bearer {key}"
    if "x-api-key" in request.headers:
        request.headers["x-api-key"] = key
    if spans is not None:
        request.headers.update(spans.headers())


def _patch(library: ModuleType, sign: Callable[[Any], None]) -> None:
    def signed(send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def wrapper(client: Any, request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            sign(request)
            return send(client, request, *args, **kwargs)

        return wrapper

    for client in (library.Client, library.AsyncClient):
        client.send = signed(client.send)


def _keep_context_in_threads() -> None:
    """Threads and pools started by an agent go on in its context; Python starts them without."""
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start

    @functools.wraps(submit)
    def submit_in_context(
        self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: object, **kwargs: object
    ) -> "Future[Any]":
        return submit(self, contextvars.copy_context().run, function, *args, **kwargs)

    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        # A pool's own threads outlive the call that happened to start them.
        if current_key.get() is not None and not _serves_a_pool(self):
            self.run = functools.partial(contextvars.copy_context().run, self.run)
        start(self)

    ThreadPoolExecutor.submit = submit_in_context
    threading.Thread.start = start_in_context


def _serves_a_pool(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    return getattr(target, "__module__", "") == "concurrent.futures.thread"
