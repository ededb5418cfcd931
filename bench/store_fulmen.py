"""Fulmen's store under the load of `store.py`: a SQLite file behind HTTP, and its own client.

Arguments: `serve` and how many rollouts to queue, or `agents` and a `Crowd` as JSON.
"""

import secrets

from fulmen.schema.records import Lease, Outcome, Rollout, Span, Task
from fulmen.store.base import Store
from store_load import TEXT, Round

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
