"""Where the store of a run is: in its folder, or where its folder says."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from databases import PASSWORD, Postgres
from fulmen.launch.record import open_record
from fulmen.schema.config import EvalConfig, make_config
from fulmen.schema.errors import ConfigError, StoreError
from fulmen.schema.place import schema_of, with_schema, without_schema
from fulmen.schema.records import Rollout, Task
from fulmen.trainer.folder import RunFolder, open_folder

GIVEN = {"agent": "a", "tasks": "t", "model": "m"}


@pytest.fixture
def place(postgres: Postgres) -> str:
    return without_schema(postgres.url())


@pytest.fixture
def with_pgpass(postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)


def new_folder(path: Path) -> RunFolder:
    return open_folder(str(path), "x", "fail")[0]


def queued(folder: RunFolder, place: str | None, *names: str) -> int:
    """Open the run's store, queue rollouts, and close it; returns how many are queued then."""

    async def scenario() -> int:
        store = open_record(folder, place)
        task = Task(id="t", input=1)
        await store.enqueue([Rollout(id=name, task=task, group="g", step=1) for name in names])
        number = (await store.counts())["queued"]
        await store.close()
        return number

    return asyncio.run(scenario())


def test_a_run_is_found_again_where_its_folder_says_it_is(place, tmp_path, with_pgpass):
    with new_folder(tmp_path / "Calc run") as folder:
        assert queued(folder, place, "a", "b") == 2
    again, resumed = open_folder(str(tmp_path / "Calc run"), "x", "resume")
    with again:
        assert resumed
        assert queued(again, None, "c") == 3
        assert queued(again, place) == 3
        assert not again.database.exists()
        assert (schema_of(again.store_url or "") or "").startswith("fulmen_calc_run_")


def test_runs_in_one_database_have_schemas_of_their_own(place, tmp_path):
    with new_folder(tmp_path / "one" / "run") as one, new_folder(tmp_path / "two" / "run") as two:
        assert queued(one, place, "a") == 1
        assert queued(two, place, "a", "b") == 2


def test_no_file_of_a_run_holds_the_password(place, tmp_path):
    with new_folder(tmp_path / "run") as folder:
        config = make_config(EvalConfig, GIVEN | {"store": place})
        folder.write_config(config, {})
        queued(folder, config.store, "a")
        texts = [path.read_text() for path in folder.path.iterdir()]
    assert any("store = " in text for text in texts)
    assert all(word not in text for text in texts for word in (PASSWORD, "%20"))


def test_a_refused_url_is_shown_without_its_password():
    with pytest.raises(ConfigError, match="store is 'mysql://me@db/runs': write postgresql://"):
        make_config(EvalConfig, GIVEN | {"store": "mysql://me:secret@db/runs"})


def test_a_schema_that_holds_a_run_is_not_begun_in_again(place, tmp_path, postgres):
    named = with_schema(place, schema_of(postgres.url()) or "")
    with new_folder(tmp_path / "one") as one, new_folder(tmp_path / "two") as two:
        queued(one, named, "a")
        with pytest.raises(StoreError, match="it holds a run already"):
            open_record(two, named)
        assert two.store_url is None


@pytest.mark.parametrize(
    ("begin", "go_on", "words"),
    [
        (lambda _: None, lambda place: place, r"its store is run\.db, not postgresql://fulmen@"),
        (lambda place: place, lambda p: with_schema(p, "other"), "its store is in schema fulmen_"),
    ],
)
def test_a_run_does_not_go_on_in_another_place(
    place, tmp_path, begin: Callable[[str], str | None], go_on: Callable[[str], str], words
):
    with new_folder(tmp_path / "run") as folder:
        queued(folder, begin(place), "a")
        with pytest.raises(ConfigError, match=words):
            open_record(folder, go_on(place))


def test_a_run_whose_schema_is_gone_is_not_begun_anew(place, tmp_path, postgres):
    with new_folder(tmp_path / "run") as folder:
        queued(folder, place, "a")
        postgres.sql(f"DROP SCHEMA {schema_of(folder.store_url or '')} CASCADE")
        with pytest.raises(StoreError, match="there is no store"):
            open_record(folder, place)
