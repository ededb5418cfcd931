"""Requests wait while weights change, and none of them waits longer than its client would.

A client that gives up sends the request again, up to twice; so does one that is answered 503. An
answer that says when to come back is therefore better than silence until the client hangs up, and
both are worse than waiting, which no client notices.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fulmen.gateway.errors import RequestRefused

_UNKNOWN_TIMEOUT_S = 60.0
"""Read timeout of a client that does not tell: the shortest default found among agent frameworks
(LlamaIndex); the others wait ten minutes."""
_MARGIN = 0.25
"""Share of the read timeout that is left for the answer itself."""
_RETRY_AFTER_S = 5


class Gate:
    """Open, or held by whoever changes weights."""

    def __init__(self) -> None:
        self._holds = 0
        self._open = asyncio.Event()
        self._open.set()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """New requests wait while the context is open; nobody sees an error."""
        self._holds += 1
        self._open.clear()
        try:
            yield
        finally:
            self._holds -= 1
            if self._holds == 0:  # two may overlap
                self._open.set()

    async def passed(self, patience_s: float) -> None:
        """Return once the gate is open.

        Raises:
            RequestRefused: 503 with `Retry-After`, if it is still held after `patience_s`.
        """
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(patience_s):
                await self._open.wait()
        except TimeoutError:
            raise RequestRefused(
                "the policy is being updated; ask again",
                status=503,
                code="policy_updating",
                retry_after_s=_RETRY_AFTER_S,
            ) from None


def patience(headers: Mapping[str, str]) -> float:
    """How long a request may be held, seconds: its client's read timeout less a margin.

    >>> patience({"x-stainless-read-timeout": "600"})
    450.0
    >>> patience({"x-stainless-read-timeout": "NOT_GIVEN"})
    45.0
    """
    try:
        timeout = float(headers.get("x-stainless-read-timeout", ""))
    except ValueError:
        timeout = _UNKNOWN_TIMEOUT_S
    if not 0 < timeout < float("inf"):
        timeout = _UNKNOWN_TIMEOUT_S
    return timeout * (1 - _MARGIN)
