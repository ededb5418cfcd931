"""A whole store out into Parquet files, and a new store from them, in either database.

What is left out belongs to the place, not to the run: the secret that signs rollout keys (a new
place makes its own), and the marks of processes that are at work.
"""

from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import Connection, MetaData, Table, func, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from fulmen.schema.errors import DataError, StoreError
from fulmen.store import tables
from fulmen.store.migrate import migrate
from fulmen.store.open import make_tables, open_database
from fulmen.store.parquet import read_table, rows_in, write_table

LEFT_OUT = (tables.meta, tables.writers)
CARRIED = tuple(table for table in tables.metadata.sorted_tables if table not in LEFT_OUT)
"""The tables of an archive, each after those that it refers to."""


def file_of(table: str) -> str:
    """The name of a table's file.

    >>> file_of("calls")
    'calls.parquet'
    """
    return f"{table}.parquet"


def write_tables(where: str, folder: Path) -> dict[str, int]:
    """Write every table of a store of today's format, as of one moment; returns rows by table.

    Raises:
        StoreError: the store cannot be read.
    """
    database = open_database(where)
    try:
        engine = database.reading or database.writing
        with engine.begin() as connection:
            return {
                table.name: write_table(connection, table, folder / file_of(table.name))
                for table in CARRIED
            }
    except DBAPIError as error:
        raise database.explain(error) from error
    finally:
        database.close()


def check_tables(folder: Path, counts: Mapping[str, int]) -> None:
    """Raise DataError unless every file is there and has the rows that it should."""
    for name, count in counts.items():
        path = folder / file_of(name)
        if (found := rows_in(path)) != count:
            raise DataError(f"{path}: it has {found} rows, and should have {count}")


def make_store(where: str, folder: Path, counts: Mapping[str, int], form: int) -> None:
    """Make a store in a new place from the files of `write_tables`: wholly, or not at all.

    One of an older format is migrated.

    Args:
        where: as for `open_store`; there must be no store yet.
        folder: where the files are.
        counts: rows by table.
        form: the format of the store that was written.

    Raises:
        DataError: a file does not hold what it must.
        StoreError: there is a store already, or it cannot be written.
    """
    if not tables.OLDEST <= form <= tables.FORMAT:
        raise StoreError(
            f"{folder}: of store format {form}, and this Fulmen reads {tables.OLDEST} to "
            f"{tables.FORMAT}",
            hint="upgrade Fulmen" if form > tables.FORMAT else "use the version that wrote it",
        )
    database = open_database(where)
    try:
        with database.preparing(True) as connection:
            if inspect(connection).get_table_names():
                raise StoreError(f"{database.where}: it is taken", hint="name a new place")
            targets = _targets(connection, form)
            if odd := set(counts) ^ {table.name for table in targets}:
                raise DataError(f"{folder}: tables are missing or unknown ({', '.join(odd)})")
            for table in targets:
                _fill(connection, table, folder / file_of(table.name))
            if form < tables.FORMAT:
                migrate(connection, form)
            _finish(connection)
    except IntegrityError as error:
        raise DataError(f"{folder}: its tables do not fit together ({error.orig})") from error
    except DBAPIError as error:
        raise database.explain(error) from error
    finally:
        database.close()


def _targets(connection: Connection, form: int) -> list[Table]:
    """The empty tables of a format, made; those of an archive, in the order of references."""
    if form == tables.FORMAT:
        make_tables(connection)
        return list(CARRIED)
    migrate(connection, None, to=tables.revision_of(form))
    found = MetaData()
    found.reflect(connection)
    left_out = {*(table.name for table in LEFT_OUT), tables.revision.name}
    return [table for table in found.sorted_tables if table.name not in left_out]


def _fill(connection: Connection, table: Table, path: Path) -> None:
    connection.execute(table.delete())  # counters begin with zeros
    for rows in read_table(path, table):
        connection.execute(insert(table), rows)


def _finish(connection: Connection) -> None:
    """What a database does for rows that it numbers, or checks, itself."""
    if connection.dialect.name == "postgresql":
        last = connection.scalar(select(func.max(tables.rollouts.c.position)))
        sequence = func.pg_get_serial_sequence("rollouts", "position")
        if last is not None:
            connection.execute(select(func.setval(sequence, last)))
    elif connection.execute(text("PRAGMA foreign_key_check")).first() is not None:
        raise DataError("the archive's tables do not fit together: rows refer to none")
