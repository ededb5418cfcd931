"""The life of a rollout as pure functions: what may follow what."""

from fulmen.schema.records import Outcome
from fulmen.store.base import Status

RETRIED = frozenset({"infrastructure", "timeout"})
"""Failures that say nothing about the policy: tried again while attempts are left."""


def after(outcome: Outcome, attempt: int, max_attempts: int) -> Status:
    """The status of a rollout whose attempt ended so.

    >>> after(Outcome(), 1, 3), after(Outcome(failure="agent"), 1, 3)
    ('succeeded', 'failed')
    >>> [after(Outcome(failure="timeout"), attempt, 3) for attempt in (1, 2, 3)]
    ['queued', 'queued', 'failed']
    """
    if outcome.failure is None:
        return "succeeded"
    if outcome.failure == "cancelled":
        return "cancelled"
    if outcome.failure in RETRIED and attempt < max_attempts:
        return "queued"
    return "failed"
