"""Agent Lightning's in-memory store under the load of `store.py`, in an environment that has it.

Server and client are its own: `LightningStoreServer` as its command `agl store` starts it, but
silent, and `LightningStoreClient`. The number of a span is the agent's own, which spares the peer
the request for it that its tracer makes before each span. What its client gives up, after tries of
its own, is asked again, for as long as it takes. Arguments: `serve` and how many rollouts
to queue, or `agents` and a `Crowd` as JSON.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import aiohttp  # pyright: ignore
from agentlightning import InMemoryLightningStore, LightningStoreClient  # pyright: ignore
from agentlightning.store.client_server import LightningStoreServer  # pyright: ignore
from agentlightning.types import (  # pyright: ignore
    EnqueueRolloutRequest,
    OtelResource,
    Span,
    TraceStatus,
)

from store_load import TEXT, Crowd, Round, run_agents, serve_until_told

T = TypeVar("T")


class Client:
    """An agent's side."""

    def __init__(self, client: LightningStoreClient) -> None:
        self._client = client

    async def claim(self, worker: str) -> Any:
        while True:
            rollout = await _at_last(lambda: self._client.dequeue_rollout(worker))
            if rollout is not None:
                return rollout
            await asyncio.sleep(0.1)

    async def span(self, ticket: Any, what: Round) -> None:
        span = Span(
            rollout_id=ticket.rollout_id,
            attempt_id=ticket.attempt.attempt_id,
            sequence_id=what.number + 1,
            trace_id=secrets.token_hex(16),
            span_id=secrets.token_hex(8),
            parent_id=None,
            name="execute_tool",
            status=TraceStatus(status_code="OK"),
            attributes={"gen_ai.tool.name": "sleep", "round": what.number, "text": TEXT},
            events=[],
            links=[],
            start_time=what.started,
            end_time=what.ended,
            context=None,
            parent=None,
            resource=OtelResource(attributes={}, schema_url=""),
        )
        await _at_last(lambda: self._client.add_span(span))

    async def finish(self, ticket: Any) -> None:
        attempt = ticket.attempt.attempt_id
        name = ticket.rollout_id
        await _at_last(lambda: self._client.update_attempt(name, attempt, status="succeeded"))


async def _at_last(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until there is an answer."""
    while True:
        try:
            return await ask()
        except (aiohttp.ClientError, TimeoutError):
            continue


@contextlib.asynccontextmanager
async def connect(url: str, _key: str) -> AsyncIterator[Client]:
    """A client of the server at the URL."""
    client = LightningStoreClient(url)
    try:
        yield Client(client)
    finally:
        await client.close()


async def serve(rollouts: int) -> None:
    """The store with rollouts in its queue."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = InMemoryLightningStore(thread_safe=True)
    queued = [
        EnqueueRolloutRequest(input={"question": f"What is {n} + {n}?"}, mode="train")
        for n in range(rollouts)
    ]
    await store.enqueue_many_rollouts(queued)
    server = LightningStoreServer(store, host="127.0.0.1", port=port, launch_mode="asyncio")
    await server.start()

    async def facts() -> dict[str, Any]:
        ended = await store.query_rollouts(status_in=["succeeded"])
        spans = [len(await store.query_spans(rollout.rollout_id)) for rollout in ended]
        return {"succeeded": len(ended), "spans": sum(spans)}

    await serve_until_told(facts, url=f"http://127.0.0.1:{port}", key="")
    await server.stop()


if __name__ == "__main__":
    logging.disable(logging.INFO)
    what, argument = sys.argv[1:]
    if what == "serve":
        asyncio.run(serve(int(argument)))
    else:
        asyncio.run(run_agents(Crowd(**json.loads(argument)), connect))
