"""What a store answers to the questions of other machines."""

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from fulmen.schema.errors import ConfigError, DataError, FulmenError, LeaseLost, StoreError
from fulmen.schema.packing import pack
from fulmen.schema.records import Lease
from fulmen.schema.role_keys import Role
from fulmen.server.ends import EndsList
from fulmen.store import verbs
from fulmen.store.base import Store
from fulmen.store.verbs import Ask, Refusal, verb_of

MOST_WAIT_S = 25.0
"""A question is answered after so long, seconds, with nothing if there is nothing."""
_MOST_LEASE_S = 86400.0

_OF_WORKERS: frozenset[type[Ask]] = frozenset(
    {
        verbs.Claim,
        verbs.GiveBack,
        verbs.Heartbeat,
        verbs.RecordSpans,
        verbs.Finish,
        verbs.AddRewards,
        verbs.Ends,
    }
)
_KINDS: dict[type[FulmenError], Any] = {
    kind: kind.__name__ for kind in (LeaseLost, StoreError, DataError, ConfigError)
}

_log = logging.getLogger(__name__)


class ServedStore(Store, Protocol):
    """A store that others may be let use."""

    async def claim_for(
        self, workers: Sequence[tuple[str, int]], *, wait_s: float = 0.0, lease_s: float = 60.0
    ) -> list[Lease]:
        """As `claim`, for several workers with the most that each takes."""
        ...

    async def give_back(self, leases: Sequence[Lease]) -> None:
        """Undo a claim whose leases nobody has seen."""
        ...

    def on_attempt_end(self, callback: Callable[[str, int], None]) -> None:
        """Call back from any thread when an attempt may no longer write."""
        ...


def check(role: Role, ask: Ask) -> None:
    """Raises StoreError if a role may not ask this, DataError if nobody may."""
    lease_s = getattr(ask, "lease_s", 0.0)
    if not (math.isfinite(lease_s) and 0 <= lease_s <= _MOST_LEASE_S):
        raise DataError(f"a lease of {lease_s} s", hint=f"at most {_MOST_LEASE_S:.0f} s")
    if role == "admin":
        return
    if type(ask) not in _OF_WORKERS:
        raise StoreError(
            f"a worker's key does not allow {verb_of(type(ask))}", hint="it needs the admin's key"
        )
    if isinstance(ask, verbs.AddRewards):
        others = sorted({reward.source for reward in ask.rewards} - {"agent"})
        if others:
            raise StoreError(
                f"a worker's key does not allow rewards of a {others[0]}, only an agent's own"
            )


def refusal_of(error: Exception) -> Refusal:
    """An error as it is sent; one of ours that has no business there is logged and named."""
    if isinstance(error, FulmenError):
        kind = _KINDS.get(type(error), "StoreError")
        return Refusal(kind=kind, message=error.message, hint=error.hint)
    _log.error("a question to the store failed", exc_info=error)
    return Refusal(kind="StoreError", message=f"the server failed: {type(error).__name__}: {error}")


class Answering:
    """Questions to the methods of a store."""

    def __init__(self, store: ServedStore, ends: EndsList) -> None:
        self._store, self._ends = store, ends
        self._ways: dict[type[Ask], Callable[[Any], Awaitable[object]]] = {
            verbs.Enqueue: lambda ask: store.enqueue(ask.rollouts),
            verbs.Claim: self.claim,
            verbs.GiveBack: self._give_back,
            verbs.Heartbeat: self._heartbeat,
            verbs.ExpireLeases: lambda ask: store.expire_leases(now=ask.now),
            verbs.RecordCalls: lambda ask: store.record_calls(ask.calls),
            verbs.SupersedeCalls: lambda ask: store.supersede_calls(
                ask.rollout_id, ask.attempt, ask.ids
            ),
            verbs.RecordSpans: lambda ask: store.record_spans(ask.spans),
            verbs.Finish: lambda ask: store.finish(ask.lease.lease(), ask.outcome),
            verbs.Cancel: lambda ask: store.cancel(ask.rollout_ids),
            verbs.WaitFinished: self._wait_finished,
            verbs.Results: lambda ask: store.results(ask.rollout_ids),
            verbs.AddRewards: lambda ask: store.add_rewards(ask.rewards),
            verbs.CommitStep: lambda ask: store.commit_step(ask.step),
            verbs.AddCheckpoint: lambda ask: store.add_checkpoint(ask.step, ask.folder),
            verbs.Steps: lambda _: store.steps(),
            verbs.DiscardAfter: lambda ask: store.discard_after(ask.step),
            verbs.Counts: lambda _: store.counts(),
            verbs.Ends: self._ends_since,
        }

    async def answer(self, ask: Ask) -> bytes:
        """The answer as bytes; raises what the store raises."""
        return pack(await self._ways[type(ask)](ask), "an answer of the store")

    async def claim(self, ask: verbs.Claim) -> list[Lease]:
        """Leases, each of one of the workers that ask."""
        workers = [(one.worker, one.limit) for one in ask.workers]
        wait_s = min(ask.wait_s, MOST_WAIT_S)
        return await self._store.claim_for(workers, wait_s=wait_s, lease_s=ask.lease_s)

    async def _give_back(self, ask: verbs.GiveBack) -> None:
        await self._store.give_back([one.lease() for one in ask.leases])

    async def _heartbeat(self, ask: verbs.Heartbeat) -> list[tuple[str, int]]:
        leases = [one.lease() for one in ask.leases]
        lost = await self._store.heartbeat(leases, lease_s=ask.lease_s)
        return [(lease.rollout.id, lease.attempt) for lease in lost]

    async def _wait_finished(self, ask: verbs.WaitFinished) -> list[str]:
        wait_s = max(0.0, min(ask.wait_s, MOST_WAIT_S))
        return await self._store.wait_finished(ask.rollout_ids, timeout_s=wait_s)

    async def _ends_since(self, ask: verbs.Ends) -> verbs.Heard:
        wait_s = max(0.0, min(ask.wait_s, MOST_WAIT_S))
        return await self._ends.since(ask.epoch, ask.after, wait_s=wait_s)


def waits(ask: Ask) -> bool:
    """Whether a question may be answered late.

    >>> waits(verbs.Claim(workers=())), waits(verbs.Claim(workers=(), wait_s=5.0))
    (False, True)
    """
    return isinstance(ask, verbs.WAITING) or (isinstance(ask, verbs.Claim) and ask.wait_s > 0)
