"""The state machine of a rollout, as pure functions: who may write, and what comes next.

The picture is in `fulmen.store.base`. Nothing else decides a status.
"""

from typing import NamedTuple

from fulmen.schema.records import FailureKind, Retry
from fulmen.store.base import Status

OPEN: tuple[Status, ...] = ("queued", "running")
"""The statuses that a cancellation ends."""

DEADLINE_GRACE_S = 30.0
"""An attempt ends as `timeout` so long after its deadline, whatever its worker says: a worker that
works has stopped it by then, with seconds to yield and to be killed, and told."""


class Next(NamedTuple):
    """What becomes of a rollout whose attempt has ended."""

    status: Status
    pause_s: float = 0.0
    """If it is queued: how long it rests before it can be claimed."""


def is_current(status: Status, latest: int, attempt: int) -> bool:
    """Whether this attempt may write: it is the latest of its rollout and still runs.

    >>> is_current("running", latest=2, attempt=2), is_current("running", latest=2, attempt=1)
    (True, False)
    """
    return status == "running" and attempt == latest


def next_of(failure: FailureKind | None, *, begun: int, retry: Retry) -> Next:
    """What follows an attempt that has just ended.

    Args:
        failure: why the attempt failed; None: it did not.
        begun: attempts begun so far, the ended one included.
        retry: of the rollout.

    >>> next_of("infrastructure", begun=1, retry=Retry(attempts=3, pause_s=2.0))
    Next(status='queued', pause_s=2.0)
    >>> next_of("infrastructure", begun=3, retry=Retry(attempts=3)).status
    'failed'
    """
    if failure is None:
        return Next("succeeded")
    if failure == "cancelled":
        return Next("cancelled")
    pause = retry.after(failure, begun=begun)
    return Next("failed") if pause is None else Next("queued", pause)
