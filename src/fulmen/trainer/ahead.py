"""The next step's agents start while the policy learns, and wait at the gate for its new weights.

Before it asks the policy for the first time an agent has work of its own: it starts, sets up its
tools, writes a request. All that is done while the learner computes. Nothing is sampled meanwhile:
every token of a step is still of one version, and the same token as without this.
"""

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fulmen.schema.records import Rollout
from fulmen.store.base import Store
from fulmen.trainer.collect import Stopwatch

Hold = Callable[[], AbstractAsyncContextManager[None]]
"""Makes requests to the policy wait while the context is open."""

_LONGEST_S = 10.0
"""Agents' deadlines and their clients' patience run while they wait: they wait no longer than so,
as far as the learning before tells."""


class Ahead:
    """Asks for rollouts before their step has begun; a step that asks for them again finds them."""

    def __init__(self, store: Store, hold: Hold) -> None:
        """Nothing is asked ahead until it is known how long learning takes."""
        self._store, self._hold = store, hold
        self._took_s = math.inf
        self._asked: list[str] = []

    @asynccontextmanager
    async def asking(self, rollouts: Sequence[Rollout]) -> AsyncIterator[None]:
        """The policy learns inside the context, and has new weights when it is left."""
        if self._took_s > _LONGEST_S:
            rollouts = ()
        async with self._hold():
            self._asked = [rollout.id for rollout in rollouts]
            if rollouts:
                await self._store.enqueue(rollouts)
            watch = Stopwatch()
            yield
            self._took_s = watch.seconds

    async def withdraw(self) -> None:
        """End what was asked last: its step will not come."""
        if self._asked:
            await self._store.cancel(self._asked)
