"""Which rollout a request belongs to, when many share one process.

The rollout key of the current attempt is a context variable. What agents send HTTP with is changed
to put it on requests to the gateway, and on no others (`senders.py`). So a client made once, at
import, still sends every rollout's own key.
"""

import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from fulmen.runner.senders import change_http_client, change_httpx
from fulmen.tracing.imports import after_import
from fulmen.tracing.stream import SpanStream

current_key: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "fulmen_rollout_key", default=None
)
"""The key of the attempt that the running code belongs to."""


def install(gateway: str, spans: SpanStream | None = None) -> None:
    """Attribute requests to the gateway (its base URL) from now on, in this process.

    With the spans of the agent's framework they also say which agent asks, and under which span.
    """
    parts = urlsplit(gateway)
    sign = functools.partial(_sign, gateway=(parts.hostname, parts.port), spans=spans)
    after_import(
        {
            "httpx": functools.partial(change_httpx, sign=sign),
            "httpx2": functools.partial(change_httpx, sign=sign),
            "http.client": functools.partial(change_http_client, sign=sign),
        }
    )
    _keep_context_in_threads()


def _sign(
    host: str | None,
    port: int | None,
    *,
    gateway: tuple[str | None, int | None],
    spans: SpanStream | None,
) -> dict[str, str] | None:
    key = current_key.get()
    if key is None or (host, port) != gateway:
        return None
    told = spans.headers() if spans is not None else {}
    return {**told, "authorization": f"Bearer {key}", "x-api-key": key}


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
