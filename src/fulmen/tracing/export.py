"""Finished rollouts to a tracing backend (Jaeger, Phoenix, Langfuse …), beside the training."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote

import httpx

from fulmen.schema.records import RolloutResult
from fulmen.tracing.otlp import PROTOBUF, write_rollouts

_MOST_WAITING = 64
"""Batches; while the backend is slower than that, further ones are left out and counted."""
_TIMEOUT_S = 10.0
_CLOSE_S = 20.0


def read_headers(text: str) -> dict[str, str]:
    """Headers as OTEL_EXPORTER_OTLP_HEADERS has them.

    >>> read_headers("x-api-key=a%20b,project=p")
    {'x-api-key': 'a b', 'project': 'p'}
    """
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}


class OtlpExporter:
    """Posts rollouts over OTLP/HTTP. A backend that fails costs its traces, never the run."""

    def __init__(
        self, endpoint: str, *, headers: Mapping[str, str], failed: Callable[[str], None]
    ) -> None:
        """`endpoint` as OTEL_EXPORTER_OTLP_ENDPOINT has it, without `/v1/traces`.

        `failed` is told once, in one line, that traces are being lost.
        """
        self.lost = 0
        """Rollouts that did not arrive."""
        self._url = endpoint.rstrip("/") + "/v1/traces"
        self._client = httpx.AsyncClient(headers=dict(headers), timeout=_TIMEOUT_S)
        self._failed = failed
        self._waiting: asyncio.Queue[Sequence[RolloutResult]] = asyncio.Queue(_MOST_WAITING)
        self._sending = asyncio.create_task(self._send_all())

    def export(self, results: Sequence[RolloutResult]) -> None:
        """Send rollouts, soon."""
        if not results:
            return
        try:
            self._waiting.put_nowait(results)
        except asyncio.QueueFull:
            self._lose(results, "it is slower than the rollouts come")

    async def aclose(self) -> None:
        """Send what is waiting, for so long, and end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._waiting.join(), _CLOSE_S)
        self._sending.cancel()
        await self._client.aclose()

    async def _send_all(self) -> None:
        while True:
            results = await self._waiting.get()
            try:
                await self._send(results)
            finally:
                self._waiting.task_done()

    async def _send(self, results: Sequence[RolloutResult]) -> None:
        try:
            body = await asyncio.to_thread(write_rollouts, results)
            answer = await self._client.post(
                self._url, content=body, headers={"content-type": PROTOBUF}
            )
        except Exception as error:
            # Of whatever kind: the sender must outlive it, or the run would wait for it at the end.
            self._lose(results, f"{type(error).__name__}: {error}".rstrip(": "))
            return
        if answer.status_code >= 300:
            self._lose(results, f"status {answer.status_code}")

    def _lose(self, results: Sequence[RolloutResult], why: str) -> None:
        if not self.lost:
            self._failed(f"{self._url} does not take traces ({why}); training goes on without")
        self.lost += len(results)
