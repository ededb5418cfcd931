"""What differs between the databases that can hold a store, behind one small surface.

`fulmen.store.sqlite` and `fulmen.store.postgres` implement it; `fulmen.store.sql` and
`fulmen.store.writer` are the same for both.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from fulmen.schema.errors import StoreError

T = TypeVar("T")
READERS = 8
"""Threads of a process that read, each with a connection."""


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """What a piece of work did, announced once it is on disk."""

    value: T
    """For the caller."""
    queued: int = 0
    """Rollouts that can now be claimed."""
    due_s: float | None = None
    """So many seconds from now the first of those that rest can be claimed; None: none rests."""
    finished: tuple[str, ...] = ()
    """Ids of rollouts that reached their end."""
    ended: tuple[tuple[str, int], ...] = ()
    """Rollout id and number of each attempt that may no longer write."""


def soonest(times: Iterable[float | None]) -> float | None:
    """The least of those that are there.

    >>> soonest([None, 2.0, 0.5])
    0.5
    """
    return min((time for time in times if time is not None), default=None)


class Database(Protocol):
    """Connections to one database, and its ways."""

    where: str
    """The file or the URL, without a password: how messages begin."""
    patience_s: float
    """How long work that met a passing trouble is tried again, seconds."""

    @property
    def writing(self) -> Engine:
        """For the writer's thread alone."""
        ...

    @property
    def reading(self) -> Engine | None:
        """For all other threads; None: there is one connection, and the writer reads too."""
        ...

    def preparing(self, make: bool, /) -> AbstractContextManager[Connection]:
        """A transaction for making or changing tables; one process at a time is in it.

        `make`: there may be nothing yet, and its place is made.
        """
        ...

    def keep_copy(self, name: str, /) -> None:
        """Keep a copy of what is there, before it is migrated, where that is for us to do."""
        ...

    def explain(self, error: DBAPIError, /) -> StoreError:
        """A database error in the words of the user: where, what happened, what to do."""
        ...

    def passes(self, error: DBAPIError, /) -> bool:
        """Whether the transaction is undone, or unknown, and may do better on the next try."""
        ...

    def enroll(self, connection: Connection, /) -> None:
        """Make this process known to the tables, whose writer counts its batches from 1."""
        ...

    def first_time(self, connection: Connection, batch: int, /) -> bool:
        """Whether the batch of this number was not committed before; marks it in its transaction.

        This tells a commit whose answer was lost from one that failed.

        Raises:
            StoreError: the database has forgotten what it had confirmed.
        """
        ...

    def hold(self, connection: Connection, rollout_ids: Collection[str], /) -> None:
        """Keep rollouts as they are until the transaction ends, if other processes may want them.

        Each process waits for them in the same order.
        """
        ...

    def tell(self, connection: Connection, changes: Iterable[Change[object]], /) -> None:
        """Have other processes told, once the transaction is committed."""
        ...

    def listen(
        self, heard: Callable[[Change[None]], None], again: Callable[[float], None], /
    ) -> None:
        """Call `heard` with what other processes did, from a thread of its own.

        After it may have missed something, `again` is called with the seconds for how long.
        """
        ...

    def size(self, connection: Connection, /) -> int:
        """What the store takes on disk, free room that it will use again included."""
        ...

    def compact(self) -> None:
        """Give free room back, where that is for us to do; nobody else may be at work.

        Raises:
            StoreError: it could not be done; nothing is lost.
        """
        ...

    def close(self) -> None:
        """Release connections."""
        ...
