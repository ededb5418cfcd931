"""Migrations: they lead to today's tables, on both databases, and keep what an older store has."""

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert, inspect, select, text, update

from fulmen.schema.errors import StoreError
from fulmen.schema.records import Retry, Rollout, Task
from fulmen.store import tables
from fulmen.store.database import Database
from fulmen.store.migrate import migrate
from fulmen.store.open import open_store
from fulmen.store.postgres import PostgresDatabase
from fulmen.store.sqlite import SqliteDatabase

ROLLOUT = Rollout(
    id="a", task=Task(id="t1", input="x"), group="g1", step=1, retry=Retry(attempts=2)
)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "run.db")
    return request.getfixturevalue("postgres").url()


@pytest.fixture
def database(place: str) -> Iterator[Database]:
    opened = SqliteDatabase(place) if place.endswith(".db") else PostgresDatabase(place)
    yield opened
    opened.close()


def make_format(database: Database, number: int) -> None:
    """What the Fulmen of that format made, with a rollout in it; that of 3 had no migrations."""
    record = msgspec.to_builtins(ROLLOUT)
    record["max_attempts"] = record.pop("retry")["attempts"]
    with database.preparing(True) as connection:
        config = Config()
        config.set_main_option("script_location", "fulmen.store:migrations")
        config.attributes["connection"] = connection
        command.upgrade(config, tables.revision_of(number))
        if number == 3:
            tables.revision.drop(connection)
        connection.execute(insert(tables.meta), {"name": "secret", "value": b"of the run"})
        connection.execute(update(tables.counters).values(value=7))
        row = f"1, 'a', 1, 'queued', 0, 0, 2, NULL, '{json.dumps(record)}'"
        connection.exec_driver_sql(f"INSERT INTO rollouts VALUES ({row})")


def standing(database: Database) -> tuple[bytes | None, set[str]]:
    """The format that a store says it has, and its tables."""
    with database.preparing(False) as connection:
        query = select(tables.meta.c.value).where(tables.meta.c.name == "format")
        return connection.scalar(query), set(inspect(connection).get_table_names())


def shape(connection: Connection) -> dict[str, list[Any]]:
    """All that a database tells of its tables."""
    seen = inspect(connection)
    return {
        name: [
            [(c["name"], str(c["type"]), c["nullable"]) for c in seen.get_columns(name)],
            seen.get_pk_constraint(name)["constrained_columns"],
            sorted(
                (f["constrained_columns"], f["referred_table"], str(f.get("options")))
                for f in seen.get_foreign_keys(name)
            ),
            sorted((i["name"], i["column_names"], i["unique"]) for i in seen.get_indexes(name)),
            [u["column_names"] for u in seen.get_unique_constraints(name)],
        ]
        for name in seen.get_table_names()
    }


def test_the_last_migration_is_named_by_the_format():
    config = Config()
    config.set_main_option("script_location", "fulmen.store:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [tables.revision_of(tables.FORMAT)]


def test_migrations_from_nothing_lead_to_todays_tables(database):
    with database.preparing(True) as connection:
        migrate(connection, None)
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
        assert connection.scalar(select(tables.revision)) == tables.revision_of(tables.FORMAT)
        migrated = shape(connection)
        tables.revision.drop(connection)
        tables.metadata.drop_all(connection)
        tables.metadata.create_all(connection)
        tables.revision.create(connection)
        assert shape(connection) == migrated
    assert standing(database)[1] == {*tables.metadata.tables, "alembic_version"}


@pytest.mark.parametrize("number", [3, 4])
async def test_an_older_store_is_taken_over_with_all_that_is_in_it(database, place, number):
    make_format(database, number)
    store = open_store(place)
    assert store.secret == b"of the run"
    assert [lease.rollout for lease in await store.claim("w1")] == [ROLLOUT]
    assert (await store.counts())["refused_calls"] == 7
    await store.close()
    form, names = standing(database)
    assert (form, names) == (b"5", {*tables.metadata.tables, "alembic_version"})
    await open_store(place).close()


async def test_a_copy_of_a_file_is_kept_as_it_was_before_its_migration(tmp_path):
    file = SqliteDatabase(str(tmp_path / "run.db"))
    make_format(file, 3)
    await open_store(tmp_path / "run.db").close()
    copy = tmp_path / "run.db.format-3"
    assert copy.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(copy)) as kept:
        assert kept.execute("SELECT value FROM meta WHERE name = 'format'").fetchall() == [(b"3",)]
        assert kept.execute("SELECT id FROM rollouts").fetchall() == [("a",)]
    file.close()


def test_a_migration_that_fails_leaves_the_store_as_it_was(database, place):
    make_format(database, 3)
    with database.preparing(False) as connection:
        connection.execute(text("CREATE TABLE writers (somebody_elses INTEGER)"))
    before = standing(database)
    with pytest.raises(StoreError, match="writers"):
        open_store(place)
    assert standing(database) == before


def test_of_several_processes_that_open_an_older_store_one_migrates_it(postgres):
    place = postgres.url()
    old = PostgresDatabase(place)
    make_format(old, 3)
    stores, start = [], threading.Barrier(4)

    def open_one() -> None:
        start.wait()
        stores.append(open_store(place))

    threads = [threading.Thread(target=open_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({store.secret for store in stores}) == 1
    assert len(stores) == 4
    assert standing(old)[0] == b"5"
    for store in stores:
        asyncio.run(store.close())
    old.close()
