"""`fulmen gc`, `archive` and `restore`, on runs of every kind, through the command line."""

import asyncio
import json
import re
import shutil
import sqlite3
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from databases import PASSWORD, Postgres
from fulmen.cli.main import main
from fulmen.launch.manifest import content_of
from fulmen.launch.record import open_record, place_of
from fulmen.schema.place import schema_of, without_schema
from fulmen.schema.records import Task
from fulmen.schema.role_keys import make_role_keys
from fulmen.trainer import ahead, collect
from fulmen.trainer.folder import open_folder, take_folder
from small_runs import settings, shape, train
from store_contents import contents, secret_of

VAL = [Task(id=f"v{n}", input=n) for n in range(2)]
CONFIG = settings(
    steps=6, tasks_per_step=2, checkpoint_every=2, keep_checkpoints=2, dynamic_sampling=False
)


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_GATHER_S", 0)
    # What a stopped run had asked for ahead of its next step differs from time to time.
    monkeypatch.setattr(ahead, "_LONGEST_S", 0)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that was stopped after step 5, with its settings."""
    path = tmp_path / "calc"
    asyncio.run(train(path, CONFIG, val=VAL, stop_after=5))
    with take_folder(path) as folder:
        folder.write_config(CONFIG, {})
    return path


def fulmen(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run a command in this process; returns its status."""
    monkeypatch.setattr("sys.argv", ["fulmen", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("run.lock", "run.db-wal", "run.db-shm")
    }


def calls_of(path: Path) -> int:
    with closing(sqlite3.connect(path / "run.db")) as db:
        return db.execute("SELECT count(*) FROM calls").fetchone()[0]


def resumed(path: Path) -> list[Any]:
    return shape(asyncio.run(train(path, CONFIG, val=VAL, resume=True)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The record of a run that nothing disturbed."""
    return shape(asyncio.run(train(tmp_path_factory.mktemp("runs") / "whole", CONFIG, val=VAL)))


# --- gc


def test_gc_deletes_what_a_run_no_longer_needs_and_the_run_goes_on_as_before(
    run, whole, monkeypatch, capsys
):
    (run / "checkpoints" / "step-000006.new").mkdir()
    (run / "run.db.format-3").write_bytes(b"x" * 5000)
    calls = calls_of(run)
    assert fulmen(monkeypatch, "gc", run, "--keep-steps", 1, "--checkpoints", 1) == 0
    said = capsys.readouterr().out
    assert calls == 24
    assert calls_of(run) == 4, "of step 5"
    assert [line.split() for line in said.splitlines()][2:5] == [
        ["calls", "24", "4"],
        ["spans", "0", "0"],
        ["checkpoints", "2", "(8", "bytes)", "1", "(7", "bytes)"],
    ]
    assert re.search(r"leftovers +2 \(4.9 KiB\) +0 \(0 bytes\)", said)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000005"]
    assert not (run / "run.db.format-3").exists()
    assert resumed(run) == whole


def test_gc_gives_the_room_of_deleted_calls_back_to_the_disk(run, monkeypatch):
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute("UPDATE calls SET request = ?", [json.dumps("said " * 20_000)])
    size = (run / "run.db").stat().st_size
    assert fulmen(monkeypatch, "gc", run, "--keep-steps", 1, "--checkpoints", 1) == 0
    assert (run / "run.db").stat().st_size < size / 3
    assert not (run / "run.db-wal").exists()


def test_a_dry_run_of_gc_changes_nothing_and_says_the_same(run, monkeypatch, capsys):
    before = files(run)
    (run / "metrics.new").touch()
    assert fulmen(monkeypatch, "gc", run, "--keep-steps", 1, "--checkpoints", 1, "--dry-run") == 0
    said = capsys.readouterr().out
    assert re.search(r"calls +24 +4\n", said)
    assert "nothing was deleted" in said
    (run / "metrics.new").unlink()
    assert files(run) == before
    assert fulmen(monkeypatch, "gc", run, "--keep-steps", 1, "--checkpoints", 1) == 0
    assert calls_of(run) == 4


def test_gc_goes_by_the_settings_of_the_run_and_keeps_all_calls_without_one(run, monkeypatch):
    assert fulmen(monkeypatch, "gc", run) == 0
    assert (calls_of(run), len(list((run / "checkpoints").iterdir()))) == (24, 2)
    config = run / "config.toml"
    config.write_text(config.read_text() + "keep_rollouts = 2\n")
    assert fulmen(monkeypatch, "gc", run) == 0
    assert calls_of(run) < 24


def test_gc_takes_a_checkpoint_that_is_not_on_record_for_a_leftover_not_for_the_newest(
    run, whole, monkeypatch
):
    """A crash behind a checkpoint, before its step was committed."""
    shutil.copytree(run / "checkpoints" / "step-000005", run / "checkpoints" / "step-000006")
    assert fulmen(monkeypatch, "gc", run, "--checkpoints", 1) == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000005"]
    assert resumed(run) == whole


@pytest.mark.parametrize("command", [["gc"], ["archive", "OUT"]])
def test_a_run_that_is_in_use_is_left_alone(run, monkeypatch, capsys, command, tmp_path):
    name, *rest = command
    before = files(run)
    with take_folder(run):
        assert fulmen(monkeypatch, name, run, *(tmp_path / word for word in rest)) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert files(run) == before
    assert not (tmp_path / "OUT").exists()


@pytest.mark.parametrize("command", [["gc"], ["archive", "OUT"]])
def test_what_is_no_run_is_refused_and_not_made_one(tmp_path, monkeypatch, capsys, command):
    name, *rest = command
    for path in (tmp_path / "none", tmp_path):
        assert fulmen(monkeypatch, name, path, *(tmp_path / word for word in rest)) == 2
        assert "is not the folder of a run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- archive and restore


@pytest.mark.parametrize("out", ["calc.zip", "calc.fulmen", "folder"])
def test_a_run_that_was_archived_and_restored_is_the_same_and_goes_on_as_the_first(
    run, whole, monkeypatch, capsys, tmp_path, out
):
    again = tmp_path / "elsewhere" / "again"
    assert fulmen(monkeypatch, "archive", run, tmp_path / out) == 0
    assert "24 rollouts, 24 calls, 0 spans, 5 steps, 1 checkpoint," in capsys.readouterr().out
    shutil.move(run, tmp_path / "gone")
    assert fulmen(monkeypatch, "restore", tmp_path / out, again) == 0
    assert f"fulmen train --config {again}/config.toml --resume" in capsys.readouterr().out
    gone = str(tmp_path / "gone" / "run.db")
    assert contents(str(again / "run.db")) == contents(gone)
    assert secret_of(str(again / "run.db")) != secret_of(gone)
    assert (again / "metrics.jsonl").read_bytes() == (
        tmp_path / "gone" / "metrics.jsonl"
    ).read_bytes()
    assert f'out = "{again}"' in (again / "config.toml").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {out, "gone", "elsewhere"}
    assert [path.name for path in again.parent.iterdir()] == ["again"]
    assert resumed(again) == whole


def test_a_run_goes_from_postgresql_to_a_file_and_back(run, postgres, monkeypatch, tmp_path):
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    place = without_schema(postgres.url())
    assert fulmen(monkeypatch, "archive", run, tmp_path / "a.zip") == 0
    served, back = tmp_path / "served", tmp_path / "back"
    assert fulmen(monkeypatch, "restore", tmp_path / "a.zip", served, "--store", place) == 0
    assert not (served / "run.db").exists()
    noted = (served / "store.url").read_text().strip()
    assert PASSWORD.replace(" ", "%20") not in noted
    assert contents(noted) == contents(str(run / "run.db"))
    assert fulmen(monkeypatch, "archive", served, tmp_path / "b") == 0
    assert fulmen(monkeypatch, "restore", tmp_path / "b", back) == 0
    assert contents(str(back / "run.db")) == contents(noted)
    assert fulmen(monkeypatch, "gc", served, "--keep-steps", 1) == 0
    with take_folder(served) as folder:
        assert place_of(folder, None) == noted


def test_pandas_and_others_read_an_archive_without_fulmen(run, monkeypatch, tmp_path):
    from pyarrow import parquet

    assert fulmen(monkeypatch, "archive", run, tmp_path / "a") == 0
    calls = parquet.read_table(tmp_path / "a" / "tables" / "calls.parquet")
    assert str(calls.schema.field("prompt_ids").type) == "list<element: int32 not null>"
    assert str(calls.schema.field("logprobs").type) == "list<element: float not null>"
    first = calls.slice(0, 1).to_pylist()[0]
    assert (first["completion_ids"], first["logprobs"]) == ([2, 3], [-0.5, -0.5])
    rollouts = parquet.read_table(tmp_path / "a" / "tables" / "rollouts.parquet").to_pylist()
    assert json.loads(rollouts[0]["record"])["split"] == "eval"


def test_the_secret_is_in_no_file_of_an_archive(run, monkeypatch, tmp_path):
    secret = secret_of(str(run / "run.db"))
    assert fulmen(monkeypatch, "archive", run, tmp_path / "a") == 0
    for data in files(tmp_path / "a").values():
        assert secret not in data
        assert secret.hex().encode() not in data


def test_the_keys_to_a_store_stay_with_it(run, monkeypatch, tmp_path):
    with take_folder(run) as folder:
        folder.write_keys(make_role_keys(secret_of(str(run / "run.db"))))
    fulmen(monkeypatch, "archive", run, tmp_path / "archive")
    fulmen(monkeypatch, "restore", tmp_path / "archive", tmp_path / "again")
    assert list(tmp_path.glob("a*/**/*.key")) == []


def test_an_archive_does_not_decide_where_the_restored_store_is(run, monkeypatch, tmp_path):
    archive = tmp_path / "archive"
    fulmen(monkeypatch, "archive", run, archive)
    text = "postgresql://elsewhere.example.org/trap?schema=calc\n"
    (archive / "run" / "store.url").write_text(text)
    told = json.loads((archive / "manifest.json").read_text())
    told["files"]["run/store.url"] = to_builtins(content_of(archive / "run" / "store.url"))
    (archive / "manifest.json").write_text(json.dumps(told))
    assert fulmen(monkeypatch, "restore", archive, tmp_path / "again") == 0
    assert not (tmp_path / "again" / "store.url").exists()


def test_an_archive_without_weights_is_not_resumed_from_the_beginning(
    run, monkeypatch, capsys, tmp_path
):
    assert fulmen(monkeypatch, "archive", run, tmp_path / "a", "--checkpoints", 0) == 0
    assert fulmen(monkeypatch, "restore", tmp_path / "a", tmp_path / "again") == 0
    assert "--resume" not in capsys.readouterr().out
    before = contents(str(tmp_path / "again" / "run.db"))
    with pytest.raises(Exception, match="has no checkpoint of its 5 steps any more"):
        resumed(tmp_path / "again")
    assert contents(str(tmp_path / "again" / "run.db")) == before


def test_nothing_is_overwritten(run, monkeypatch, capsys, tmp_path):
    (tmp_path / "a").mkdir()
    assert fulmen(monkeypatch, "archive", run, tmp_path / "a") == 2
    assert fulmen(monkeypatch, "archive", run, tmp_path / "b") == 0
    assert fulmen(monkeypatch, "restore", tmp_path / "b", run) == 2
    assert capsys.readouterr().err.count("exists already") == 2


def damaged(archive: Path, how: str) -> Path:
    """The archive, spoiled in a way."""
    table = archive / "tables" / "calls.parquet"
    manifest = archive / "manifest.json"
    match how:
        case "no archive":
            shutil.rmtree(archive)
            archive.mkdir()
        case "a file is missing":
            table.unlink()
        case "a file was cut off":
            table.write_bytes(table.read_bytes()[:-100])
        case "a bit was flipped":
            data = bytearray(table.read_bytes())
            data[len(data) // 2] ^= 1
            table.write_bytes(data)
        case "the manifest was cut off":
            manifest.write_bytes(manifest.read_bytes()[:-40])
        case "of a later version":
            manifest.write_text(manifest.read_text().replace('"archive":1', '"archive":2'))
        case "of a later store":
            text = manifest.read_text()
            manifest.write_text(text.replace('"store":', '"store":9'))
        case "leads out":
            text = manifest.read_text()
            manifest.write_text(text.replace('"run/config.toml"', '"run/../../config.toml"'))
    return archive


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no archive", "is no archive of a run"),
        ("a file is missing", "calls.parquet is missing"),
        ("a file was cut off", "calls.parquet has"),
        ("a bit was flipped", "calls.parquet is not what was written"),
        ("the manifest was cut off", "manifest.json is damaged"),
        ("of a later version", "written by a newer Fulmen"),
        ("of a later store", "upgrade Fulmen"),
        ("leads out", "outside of itself"),
    ],
)
def test_a_damaged_archive_is_refused_in_one_line_and_leaves_nothing_behind(
    run, monkeypatch, capsys, tmp_path, how, said
):
    assert fulmen(monkeypatch, "archive", run, tmp_path / "a") == 0
    archive = damaged(tmp_path / "a", how)
    capsys.readouterr()
    (tmp_path / "new").mkdir()
    assert fulmen(monkeypatch, "restore", archive, tmp_path / "new" / "again") in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("how", ["cut off", "no zip", "leads out", "not there"])
def test_a_damaged_file_is_refused_in_one_line_and_leaves_nothing_behind(
    run, monkeypatch, capsys, tmp_path, how
):
    file = tmp_path / "a.zip"
    assert fulmen(monkeypatch, "archive", run, file) == 0
    if how == "cut off":
        file.write_bytes(file.read_bytes()[:-500])
    elif how == "no zip":
        file.write_bytes(b"nothing of that kind")
    elif how == "leads out":
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("../evil", "x")
    else:
        file.unlink()
    capsys.readouterr()
    (tmp_path / "new").mkdir()
    assert fulmen(monkeypatch, "restore", file, tmp_path / "new" / "again") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list((tmp_path / "new").iterdir()) == []
    assert not (tmp_path / "evil").exists()


def test_a_server_keeps_nothing_of_an_archive_that_cannot_be_restored(
    run, postgres: Postgres, monkeypatch, tmp_path
):
    assert fulmen(monkeypatch, "archive", run, tmp_path / "a") == 0
    damaged(tmp_path / "a", "of a later store")
    url = postgres.url()
    assert fulmen(monkeypatch, "restore", tmp_path / "a", tmp_path / "again", "--store", url) == 1
    query = f"SELECT 1 FROM pg_namespace WHERE nspname = '{schema_of(url)}'"
    assert postgres.sql(query) == []


def test_without_pyarrow_the_way_to_it_is_said(run, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert fulmen(monkeypatch, "archive", run, tmp_path / "a") == 2
    assert 'pip install "fulmen[data]"' in capsys.readouterr().err
    assert not (tmp_path / "a.new").exists()


def test_an_evaluations_folder_can_be_archived_and_collected(tmp_path, monkeypatch):
    folder, _ = open_folder(str(tmp_path / "eval"), "x", "fail")
    with folder:
        asyncio.run(open_record(folder, None).close())
    assert fulmen(monkeypatch, "gc", tmp_path / "eval", "--keep-steps", 1) == 0
    assert fulmen(monkeypatch, "archive", tmp_path / "eval", tmp_path / "a") == 0
    assert fulmen(monkeypatch, "restore", tmp_path / "a", tmp_path / "b") == 0
    assert contents(str(tmp_path / "b" / "run.db")) == contents(str(tmp_path / "eval" / "run.db"))
