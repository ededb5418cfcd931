"""How much a store holds, and giving back the room of what was deleted. For stores at rest."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from fulmen.schema.records import Split
from fulmen.store.database import Database
from fulmen.store.open import open_database
from fulmen.store.retention import Bulk, bulk, bulk_of


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a store holds."""

    rows: Bulk
    bytes: int
    """On disk, room that is free to be used again included."""

    def without(self, rows: Bulk) -> "Extent":
        """With fewer rows, and the same room, some of it free."""
        return Extent(Bulk(self.rows.calls - rows.calls, self.rows.spans - rows.spans), self.bytes)


def extent_of(where: str) -> Extent:
    """How much the store of this place holds; raises StoreError if it cannot be read."""
    with _reading(where) as (database, connection):
        return Extent(bulk(connection), database.size(connection))


def what_would_go(where: str, ends: Mapping[Split, int]) -> Bulk:
    """Calls and spans that `Store.forget` would delete from step 0 to each split's end."""
    total = Bulk()
    with _reading(where) as (_, connection):
        for split, end in ends.items():
            for step in range(end + 1):
                total = total.plus(bulk_of(connection, split, step))
    return total


def compact(where: str) -> None:
    """Give free room back to the disk, where that is for us to do; takes as long as a copy.

    Raises:
        StoreError: there is no room for the copy, or others are at work.
    """
    database = open_database(where)
    try:
        database.compact()
    finally:
        database.close()


@contextmanager
def _reading(where: str) -> Iterator[tuple[Database, Connection]]:
    database = open_database(where)
    try:
        with (database.reading or database.writing).begin() as connection:
            yield database, connection
    except DBAPIError as error:
        raise database.explain(error) from error
    finally:
        database.close()
