"""Requests to a store's server, sent again while it is away."""

import asyncio
import logging
import random
import secrets
import ssl
import time

import httpx
import msgspec

from fulmen.schema.errors import ConfigError, DataError, FulmenError, LeaseLost, RunOver, StoreError
from fulmen.store.verbs import Refusal

_ERRORS: dict[str, type[FulmenError]] = {
    kind.__name__: kind for kind in (LeaseLost, RunOver, StoreError, DataError, ConfigError)
}
_AWAY = (502, 503, 504)
"""A proxy without its server, or a server that ends."""
_SHORTEST_S, _LONGEST_S = 0.05, 2.0
"""Pauses between tries."""
_THERE_S = 1.0
_CONNECT_S = 5.0
_ANSWER_S = 20.0
"""A request without an answer for so long, seconds, is sent again: the network may have been cut
without a word."""

_log = logging.getLogger(__name__)
_refusals = msgspec.msgpack.Decoder(Refusal)


def error_of(refusal: Refusal) -> FulmenError:
    """What the server's store raised."""
    return _ERRORS[refusal.kind](refusal.message, hint=refusal.hint)


class StoreLink:
    """The way to a store's server."""

    def __init__(self, url: str, key: str, *, patience_s: float) -> None:
        """`patience_s`: how long a server that is away is waited for."""
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._away_since: float | None = None
        self._told = False
        self._over = asyncio.Event()
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}", "content-type": "application/msgpack"},
            verify=ssl.create_default_context() if url.startswith("https:") else False,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )

    async def post(self, verb: str, body: bytes, *, wait_s: float = 0.0) -> bytes:
        """The answer to a question; `wait_s`: so much later than others it may come.

        Raises:
            FulmenError: what the store raised there.
            RunOver: the server has said so, now or before; there is nobody to ask any more.
            StoreError: the server has been away for longer than its patience.
        """
        timeout = httpx.Timeout(_ANSWER_S + wait_s, connect=_CONNECT_S, pool=None)
        headers = {"x-fulmen-request": secrets.token_hex(12)}
        pause = _SHORTEST_S
        while not self._over.is_set():
            began = time.monotonic()
            try:
                response = await self._http.post(
                    f"{self.url}/v1/store/{verb}", content=body, headers=headers, timeout=timeout
                )
                if response.status_code not in _AWAY:
                    return self._answer(response)
                why = f"it answers {response.status_code}"
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
                if not isinstance(error, httpx.TimeoutException):
                    self._lasted(time.monotonic() - began)
            self._away(why)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            pause = min(2 * pause, _LONGEST_S)
        raise _run_over()

    async def over(self) -> None:
        """Wait until the server has said that the run is over, and raise RunOver."""
        await self._over.wait()
        raise _run_over()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    def _answer(self, response: httpx.Response) -> bytes:
        self._away_since, self._told = None, False
        if response.status_code == 200:
            return response.content
        error = self._refused(response)
        if isinstance(error, RunOver):
            self._over.set()
        raise error

    def _lasted(self, seconds: float) -> None:
        """A connection was lost after so long: if a question waited on it, the server was there."""
        if seconds > _THERE_S:
            self._away_since = None

    def _away(self, why: str) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        left = self._away_since + self._patience_s - now
        if left <= 0:
            raise StoreError(
                f"{self.url}: no store for {self._patience_s:.0f} s ({why})",
                hint="see whether the run is still there, and can be reached from here",
            )
        if not self._told:
            self._told = True
            _log.warning("%s is away (%s); trying again for %.0f s", self.url, why, left)

    def _refused(self, response: httpx.Response) -> FulmenError:
        try:
            return error_of(_refusals.decode(response.content))
        except (msgspec.DecodeError, KeyError):
            return StoreError(
                f"{self.url} answers {response.status_code}, which is no store's answer",
                hint="give the URL that the run printed",
            )


def _run_over() -> RunOver:
    return RunOver("the run is over")
