"""The state machine of a rollout, as pure functions: who may write, and what comes next.

The picture is in `fulmen.store.base`. Nothing else decides a status.
"""

from fulmen.schema.records import FailureKind
from fulmen.store.base import Status

RETRIED: frozenset[FailureKind] = frozenset({"infrastructure", "timeout"})
"""Failures that say nothing about the agent, so that another attempt may end differently."""

OPEN: tuple[Status, ...] = ("queued", "running")
"""The statuses that a cancellation ends."""


def is_current(status: Status, latest: int, attempt: int) -> bool:
    """Whether this attempt may write: it is the latest of its rollout and still runs.

    >>> is_current("running", latest=2, attempt=2), is_current("running", latest=2, attempt=1)
    (True, False)
    """
    return status == "running" and attempt == latest


def status_after(failure: FailureKind | None, *, begun: int, max_attempts: int) -> Status:
    """The status of a rollout whose current attempt has just ended.

    Args:
        failure: why the attempt failed; None: it did not.
        begun: attempts begun so far, the ended one included.
        max_attempts: how many may be begun.

    >>> status_after("infrastructure", begun=1, max_attempts=3)
    'queued'
    >>> status_after("infrastructure", begun=3, max_attempts=3)
    'failed'
    """
    if failure is None:
        return "succeeded"
    if failure == "cancelled":
        return "cancelled"
    return "queued" if failure in RETRIED and begun < max_attempts else "failed"
