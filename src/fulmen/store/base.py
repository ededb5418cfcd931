"""What a store promises: the durable record of everything, and the queue of rollouts.

The life of a rollout, enforced here and nowhere else:

    queued ──claim──▶ running ──finish──▶ succeeded | failed
       ▲                 │
       └── rest ─────────┘   a failure that `Rollout.retry` names, with attempts left; also where
                             the lease is over (infrastructure) or the deadline (timeout)
    queued | running ──cancel──▶ cancelled

Every method is atomic and safe to repeat. Only the current attempt may write.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from fulmen.schema.records import (
    Call,
    Lease,
    Outcome,
    Reward,
    Rollout,
    RolloutResult,
    Span,
    StepRecord,
)

Status = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FINISHED: frozenset[Status] = frozenset({"succeeded", "failed", "cancelled"})
AttemptEnded = Callable[[str, int], None]
"""Given the id of a rollout and the number of its attempt."""


class Store(Protocol):
    """Durable, shared by threads and event loops; in PostgreSQL by processes, too."""

    def on_attempt_end(self, callback: AttemptEnded) -> None:
        """Have `callback(rollout_id, attempt)` called whenever an attempt may no longer write.

        It is called after the commit, in a thread of the store's: before whoever caused it goes on,
        if it was caused in this process. It must be quick, and hand over to an event loop with
        `call_soon_threadsafe`. After a connection was lost it may be called for the same again.
        """
        ...

    async def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Add rollouts to the queue in order; ids already known are left as they are.

        Returns how many were new.
        """
        ...

    async def claim(
        self, worker: str, *, limit: int = 1, wait_s: float = 0.0, lease_s: float = 60.0
    ) -> list[Lease]:
        """Take up to `limit` queued rollouts, oldest first, each as a new attempt.

        Retried rollouts that rest are passed over. With nothing to take, wait up to `wait_s`
        seconds for it: woken by the enqueue itself, or when the first has rested, never by polling.
        Returns an empty list when the time is over.
        """
        ...

    async def heartbeat(self, leases: Sequence[Lease], *, lease_s: float = 60.0) -> list[Lease]:
        """Renew leases; returns those that are no longer current (stop these agents)."""
        ...

    async def expire_leases(self, *, now: float | None = None) -> list[str]:
        """End running attempts whose lease is over as `infrastructure`, and those that are half a
        minute past their deadline as `timeout`, whether or not their lease is renewed.

        `now`: Unix time, instead of the store's own. Returns the rollout ids concerned: queued
        again, or failed if no attempt is left.
        """
        ...

    async def record_calls(self, calls: Sequence[Call]) -> None:
        """Keep calls of current attempts. Returns before they are on disk; `finish` waits for them.

        Calls of attempts that are no longer current are refused and counted (`counts`).
        """
        ...

    async def supersede_calls(self, rollout_id: str, attempt: int, ids: Sequence[str]) -> None:
        """Mark recorded calls as never received by the agent. Returns before it is on disk."""
        ...

    async def record_spans(self, spans: Sequence[Span]) -> None:
        """Keep spans; a span with a known id replaces it (start first, end later)."""
        ...

    async def finish(self, lease: Lease, outcome: Outcome) -> Status:
        """Record how an attempt ended, with its calls already on disk, in one transaction.

        Failures that the rollout's `retry` names put it back in the queue while attempts are left.
        An agent's failure after a model call that ended with a server's error counts as
        `infrastructure`. Telling the same outcome again is answered as the first time.

        Raises:
            LeaseLost: another attempt has begun, or this one ended in another way; says which.
                Nothing was written.
        """
        ...

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        """End rollouts that are not finished yet; returns how many were."""
        ...

    async def wait_finished(
        self, rollout_ids: Sequence[str], *, timeout_s: float | None = None
    ) -> list[str]:
        """Wait until at least one of the rollouts is finished; returns all finished ones.

        Woken by the commit that finishes one. On timeout returns an empty list.
        """
        ...

    async def results(self, rollout_ids: Sequence[str]) -> list[RolloutResult]:
        """The finished ones of these rollouts, in the order asked, with what was recorded."""
        ...

    async def add_rewards(self, rewards: Sequence[Reward]) -> None:
        """Keep rewards; one with the same rollout, attempt, name, source and target is replaced."""
        ...

    async def commit_step(self, step: StepRecord) -> None:
        """Record a training step and the rollouts it consumed, in one transaction.

        Raises:
            StoreError: the step exists, or one of the rollouts was consumed by another step.
        """
        ...

    async def add_checkpoint(self, step: int, folder: str) -> None:
        """Note that a committed step has its weights in `folder` after all.

        Raises:
            StoreError: there is no such step.
        """
        ...

    async def steps(self) -> list[StepRecord]:
        """All committed steps, first to last."""
        ...

    async def discard_after(self, step: int) -> int:
        """Forget steps > `step` and their rollouts, committed ones included (used by resume).

        The weights go back to the checkpoint of `step`, so what came after is asked again, with
        the same ids and seeds: a resumed run follows the undisturbed one. Returns how many
        rollouts were deleted.
        """
        ...

    async def counts(self) -> dict[str, int]:
        """Rollouts per status, and what was refused: `refused_calls`, `refused_results`."""
        ...

    async def close(self) -> None:
        """Finish pending writes and release files."""
        ...
