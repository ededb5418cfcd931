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
_SHARE = 0.1
"""Of their deadline, at most."""


class Ahead:
    """Asks for rollouts before their step has begun; a step that asks for them again finds them."""

    def __init__(self, store: Store, hold: Hold) -> None:
        """Nothing is asked ahead until it is known how long learning takes."""
        self._store, self._hold = store, hold
        self._took_s = math.inf
        self._asked = False

    @asynccontextmanager
    async def asking(self, rollouts: Sequence[Rollout]) -> AsyncIterator[None]:
        """The policy learns inside the context, and has new weights when it is left."""
        if any(self._took_s > _patience_s(rollout) for rollout in rollouts):
            rollouts = ()
        async with self._hold():
            self._asked = bool(rollouts)
            if rollouts:
                await self._store.enqueue(rollouts)
            watch = Stopwatch()
            yield
            self._took_s = watch.seconds

    async def withdraw(self, step: int) -> None:
        """End what was asked last, and forget it: no step comes after this one."""
        if self._asked:
            await self._store.discard_after(step)


def _patience_s(rollout: Rollout) -> float:
    """How long its agent may wait without coming near its deadline."""
    return min(_LONGEST_S, _SHARE * rollout.deadline_s)
