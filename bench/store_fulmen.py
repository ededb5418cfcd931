"""Fulmen's store under the load of `store.py`: a SQLite file behind HTTP, and its own client.

Arguments: `serve` and how many rollouts to queue, or `agents` and a `Crowd` as JSON.
"""

import contextlib
import json
import secrets
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from fulmen.runner.store_client import StoreClient
from fulmen.schema.records import Lease, Outcome, Rollout, Span, Task
from fulmen.schema.role_keys import make_role_keys
from fulmen.server.eventloop import run
from fulmen.server.http import Listening
from fulmen.server.store_api import StoreApi
from fulmen.store.base import Store
from fulmen.store.open import open_store
from store_load import TEXT, Crowd, Round, run_agents, serve_until_told

_GROUP = 8
DONE = Outcome(output="42")


def rollouts(first: int, count: int) -> list[Rollout]:
    """Of one step, in groups of eight, with a short task."""
    return [
        Rollout(
            id=f"s1-t{number // _GROUP:07}-{number % _GROUP}",
            task=Task(
                id=f"t{number // _GROUP:07}",
                input={"question": f"What is {number} + {number}?"},
                metadata={"answer": 2 * number},
            ),
            group=f"s1-t{number // _GROUP:07}",
            step=1,
            seed=number,
        )
        for number in range(first, first + count)
    ]


def span(lease: Lease, what: Round) -> Span:
    """What an agent emits after a round."""
    return Span(
        id=secrets.token_hex(8),
        rollout_id=lease.rollout.id,
        attempt=lease.attempt,
        name="execute_tool",
        attributes={"gen_ai.tool.name": "sleep", "round": what.number, "text": TEXT},
        status="ok",
        started=what.started,
        ended=what.ended,
    )


class Client:
    """An agent's side."""

    def __init__(self, store: Store) -> None:
        """`store`: in this process or another."""
        self._store = store

    async def claim(self, worker: str) -> Lease:
        """Waits for one as long as it takes."""
        while True:
            for lease in await self._store.claim(worker, wait_s=30.0):
                return lease

    async def span(self, ticket: Lease, what: Round) -> None:
        """Promised to be kept."""
        await self._store.record_spans([span(ticket, what)])

    async def finish(self, ticket: Lease) -> None:
        """On disk."""
        await self._store.finish(ticket, DONE)


@contextlib.asynccontextmanager
async def connect(url: str, key: str) -> AsyncIterator[Client]:
    """A client of the server at the URL."""
    store = StoreClient(url, key)
    try:
        yield Client(store)
    finally:
        await store.close()


async def serve(count: int) -> None:
    """A store with rollouts in its queue, in a file of its own."""
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as folder:
        store = open_store(Path(folder) / "run.db")
        await store.enqueue(rollouts(0, count))
        keys = make_role_keys(store.secret)

        async def facts() -> dict[str, Any]:
            with contextlib.closing(sqlite3.connect(Path(folder) / "run.db")) as kept:
                query = "SELECT count(*) FROM rollouts WHERE status = 'succeeded'"
                (succeeded,) = kept.execute(query).fetchone()
                (spans,) = kept.execute("SELECT count(*) FROM spans").fetchone()
            return {"succeeded": succeeded, "spans": spans}

        api = StoreApi(store, keys)
        app = Starlette(routes=api.routes())
        async with Listening(app, "127.0.0.1", 0) as server:
            await serve_until_told(facts, url=server.url, key=keys.worker)
            await api.aclose()
        await store.close()


if __name__ == "__main__":
    what, argument = sys.argv[1:]
    if what == "serve":
        run(serve(int(argument)))
    else:
        run(run_agents(Crowd(**json.loads(argument)), connect))
