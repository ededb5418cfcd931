"""A store that was written into Parquet files and made anew from them is the same store."""

import asyncio
import itertools
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from sqlalchemy import MetaData, text

from fulmen.schema.errors import DataError, StoreError
from fulmen.schema.records import Rollout, Task
from fulmen.store import tables
from fulmen.store.migrate import migrate
from fulmen.store.open import open_store
from fulmen.store.parquet import write_table
from fulmen.store.sqlite import SqliteDatabase
from fulmen.store.transfer import CARRIED, LEFT_OUT, file_of, make_store, write_tables
from stores import contents, follow, plans, secret_of

numbers = itertools.count(1)


def round_trip(first: str, second: str, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Write the first store, make the second from it, and write that, into `again`."""
    folder.joinpath("once").mkdir()
    folder.joinpath("again").mkdir()
    once = write_tables(first, folder / "once")
    make_store(second, folder / "once", once, tables.FORMAT)
    return once, write_tables(second, folder / "again")


def check(first: str, second: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        once, again = round_trip(first, second, Path(name))
        assert once == again
        assert contents(second) == contents(first)
        for table in CARRIED:
            files = [Path(name) / run / file_of(table.name) for run in ("once", "again")]
            assert files[0].read_bytes() == files[1].read_bytes(), table.name


@settings(max_examples=15, derandomize=True)
@given(plans())
def test_any_store_in_a_file_comes_back_as_it_was(done):
    with tempfile.TemporaryDirectory() as name:
        first, second = f"{name}/one.db", f"{name}/two.db"
        asyncio.run(follow(first, done))
        check(first, second)
        assert secret_of(first) != secret_of(second), "a secret stays where it is"


def test_any_store_goes_to_postgresql_and_back(postgres):
    @settings(max_examples=6, derandomize=True, database=None)
    @given(plans())
    def there_and_back(done):
        with tempfile.TemporaryDirectory() as name:
            first, server, back = f"{name}/one.db", postgres.url(), f"{name}/two.db"
            asyncio.run(follow(first, done))
            check(first, server)
            check(server, back)
            assert contents(back) == contents(first)

    there_and_back()


def test_every_table_is_carried_or_left_out_for_a_reason():
    assert {*CARRIED, *LEFT_OUT} == set(tables.metadata.sorted_tables)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_a_store_that_was_made_anew_goes_on_queueing_behind_what_it_has(
    database, tmp_path, request
):
    first, second = str(tmp_path / "one.db"), str(tmp_path / "two.db")
    if database == "postgresql":
        second = request.getfixturevalue("postgres").url()
    asked = [Rollout(id=n, task=Task(id="t", input=1), group="g", step=1) for n in "abcd"]
    store = open_store(first)
    await store.enqueue(asked[:2])
    await store.close()
    round_trip(first, second, tmp_path)
    store = open_store(second)
    await store.enqueue(asked[2:])
    assert [lease.rollout.id for lease in await store.claim("w", limit=9)] == ["a", "b", "c", "d"]
    await store.close()


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_files_that_do_not_fit_together_make_no_store(database, tmp_path, request):
    first, second = str(tmp_path / "one.db"), str(tmp_path / "two.db")
    if database == "postgresql":
        second = request.getfixturevalue("postgres").url()
    plan = {"step": 1, "split": "train", "input": 1, "ending": None, "tokens": [1]}
    more = {
        "logprobs": [-0.5],
        "drift": None,
        "request": {},
        "agent": "",
        "ended": 1.0,
        "reward": 1.0,
    }
    await follow(first, [plan | more])
    await follow(str(tmp_path / "none.db"), [])
    for name in ("files", "empty"):
        (tmp_path / name).mkdir()
    whole = await asyncio.to_thread(write_tables, first, tmp_path / "files")
    await asyncio.to_thread(write_tables, str(tmp_path / "none.db"), tmp_path / "empty")
    (tmp_path / "empty" / "rollouts.parquet").replace(tmp_path / "files" / "rollouts.parquet")
    with pytest.raises(DataError, match="fit together"):
        make_store(second, tmp_path / "files", whole, tables.FORMAT)
    with pytest.raises(StoreError, match="there is no store"):
        open_store(second, new=False)


OLD_ROLLOUT = """
    INSERT INTO rollouts
    (position, id, step, status, attempt, attempts_before, max_attempts, record)
    VALUES (7, 'a', 1, 'queued', 0, 0, 2, :record)
"""


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_a_store_of_an_older_format_is_migrated_on_its_way(tmp_path, database, request):
    record = {
        "id": "a",
        "task": {"id": "t", "input": 1},
        "group": "g",
        "step": 1,
        "max_attempts": 2,
    }
    old, new = SqliteDatabase(str(tmp_path / "old.db")), str(tmp_path / "new.db")
    if database == "postgresql":
        new = request.getfixturevalue("postgres").url()
    with old.preparing(True) as connection:
        migrate(connection, None, to=tables.revision_of(3))
        connection.execute(text(OLD_ROLLOUT), {"record": json.dumps(record)})
        found = MetaData()
        found.reflect(connection)
        names = {table.name for table in CARRIED}
        counts = {
            table.name: write_table(connection, table, tmp_path / file_of(table.name))
            for table in found.sorted_tables
            if table.name in names
        }
    old.close()
    make_store(new, tmp_path, counts, form=3)
    store = open_store(new, new=False)
    (lease,) = await store.claim("w", limit=9)
    assert (lease.rollout.id, lease.rollout.retry.attempts) == ("a", 2)
    await store.close()


def test_a_store_of_a_newer_format_is_refused(tmp_path):
    with pytest.raises(StoreError, match="upgrade Fulmen"):
        make_store(str(tmp_path / "new.db"), tmp_path, {}, tables.FORMAT + 1)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_holds_a_store_is_left_alone(tmp_path):
    for name in ("one.db", "two.db"):
        asyncio.run(follow(str(tmp_path / name), []))
    (tmp_path / "files").mkdir()
    counts = write_tables(str(tmp_path / "one.db"), tmp_path / "files")
    with pytest.raises(StoreError, match="taken"):
        make_store(str(tmp_path / "two.db"), tmp_path / "files", counts, tables.FORMAT)
