"""`fulmen archive` and `fulmen restore`: a run as one folder or file that anyone can read.

    manifest.json              what is in it, with checksums
    tables/rollouts.parquet …  the store, table by table
    run/                       the run's other files: settings, metrics, checkpoints

The secret that signs rollout keys stays where it is.
"""

import asyncio
import contextlib
import json
import re
import secrets
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fulmen.launch import manifest as inside
from fulmen.launch.manifest import Manifest, content_of
from fulmen.launch.record import place_of
from fulmen.schema.errors import ConfigError, DataError
from fulmen.schema.place import schema_name, with_schema
from fulmen.store import tables
from fulmen.store.open import open_store
from fulmen.store.parquet import need_pyarrow
from fulmen.store.transfer import check_tables, make_store, write_tables
from fulmen.trainer.folder import RunFolder, is_own_file, take_folder
from fulmen.trainer.history import saved_steps

_ZIP = (".zip", ".fulmen")
"""Endings of archives that are one file."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What an archive has."""

    path: Path
    rows: dict[str, int]
    """By table."""
    checkpoints: int
    bytes: int


def archive(run: Path, out: Path, *, checkpoints: int = 1, store: str | None = None) -> Carried:
    """Write a run into a new folder, or into one file if `out` ends in `.zip` or `.fulmen`.

    `checkpoints`: how many of the newest go with it. `store`: the address of the store's server, if
    it is not where the run's folder says, or asks for a password.

    Raises:
        ConfigError: `out` exists, or `run` is no run's folder, or it is in use.
        DataError: pyarrow is not installed.
        StoreError: the store cannot be read.
    """
    need_pyarrow()
    if out.exists():
        raise ConfigError(f"{out} exists already", hint="name a place that does not")
    draft = out.with_name(out.name + ".new")
    with take_folder(run) as folder, _gone_if_failed(draft):
        _remove(draft)
        (draft / "tables").mkdir(parents=True)
        saved = asyncio.run(_saved(folder, store))
        rows = write_tables(place_of(folder, store), draft / "tables")
        for file in _files(folder, saved[-checkpoints:] if checkpoints else []):
            target = draft / "run" / file.relative_to(folder.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        files = [path for path in sorted(draft.rglob("*")) if path.is_file()]
        contents = {path.relative_to(draft).as_posix(): content_of(path) for path in files}
        written = Manifest(
            archive=inside.ARCHIVE,
            store=tables.FORMAT,
            fulmen=version("fulmen"),
            run=folder.path.resolve().name,
            created=time.time(),
            rows=rows,
            files=contents,
        )
        inside.write_manifest(draft, written)
        if out.suffix in _ZIP:
            _pack(draft, out)
        else:
            draft.rename(out)
    return _carried(out, written)


def restore(source: Path, run: Path, *, store: str | None = None) -> Carried:
    """Make a run's folder, and its store, from an archive: wholly, or not at all.

    `store`: URL of the PostgreSQL database where the store shall be; None: in the folder.

    Raises:
        ConfigError: `run` exists.
        DataError: `source` is no archive or not as it was written, or pyarrow is not installed.
        StoreError: the store cannot be written.
    """
    need_pyarrow()
    if run.exists():
        raise ConfigError(f"{run} exists already", hint="name a folder that does not")
    if not source.exists():
        raise DataError(f"{source}: no such archive")
    run.parent.mkdir(parents=True, exist_ok=True)
    draft = run.with_name(run.name + ".new")
    with _unpacked(source, run.parent) as folder, _gone_if_failed(draft):
        told = inside.read_manifest(folder, source)
        inside.check_contents(folder, told, source)
        check_tables(folder / "tables", told.rows)
        _remove(draft)
        draft.mkdir()
        _bring(folder, told, draft)
        new, place = RunFolder(draft, None), str(draft / "run.db")
        if store is not None:
            place = with_schema(store, schema_name(run.name, secrets.token_hex(3)))
            new.note_store(place)
        _settle(draft / "config.toml", run)
        make_store(place, folder / "tables", told.rows, told.store)
        asyncio.run(open_store(place, new=False).close())  # with a secret of its own
        draft.rename(run)
    return _carried(run, told)


async def _saved(folder: RunFolder, place: str | None) -> list[Path]:
    """The run's checkpoints; an older store is brought up to date on the way."""
    store = open_store(place_of(folder, place), new=False)
    try:
        found = saved_steps(folder, await store.steps())
    finally:
        await store.close()
    return [folder.path / str(record.checkpoint) for record in found]


def _files(folder: RunFolder, checkpoints: list[Path]) -> Iterator[Path]:
    """The files that an archive takes along: no links, which may lead anywhere."""
    for path in sorted(folder.path.iterdir()):
        if path.is_file() and not path.is_symlink() and not is_own_file(path.name):
            yield path
    for checkpoint in checkpoints:
        for path in sorted(checkpoint.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path


def _bring(folder: Path, told: Manifest, run: Path) -> None:
    """Copy the run's files that the manifest names, but none that decides where a store is."""
    for name in told.files:
        room, _, rest = name.partition("/")
        if room == "run" and not is_own_file(rest):
            (run / rest).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / name, run / rest)


def _settle(config: Path, run: Path) -> None:
    """Have the settings name the run's new place, so that they can be resumed with."""
    if not config.is_file():
        return
    lines = config.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not re.match(r"(out|store) = ", line)]
    kept.append(f"out = {json.dumps(str(run))}  # restored")
    config.write_text("\n".join(kept) + "\n", encoding="utf-8")


def _pack(folder: Path, out: Path) -> None:
    """Make one file of a folder, which is then gone."""
    draft = folder.with_name(folder.name + "-file")
    with _gone_if_failed(draft):
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as file:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    file.write(path, path.relative_to(folder).as_posix())
        draft.rename(out)
    shutil.rmtree(folder)


@contextlib.contextmanager
def _unpacked(source: Path, near: Path) -> Iterator[Path]:
    """The archive as a folder."""
    if source.is_dir():
        yield source
        return
    scratch = Path(tempfile.mkdtemp(prefix=".fulmen-", dir=near))
    try:
        try:
            with zipfile.ZipFile(source) as file:
                inside.check_names(file.namelist(), source)
                file.extractall(scratch)
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise DataError(
                f"{source} is no archive of a run, or not whole ({error})",
                hint="give what fulmen archive wrote",
            ) from None
        yield scratch
    finally:
        shutil.rmtree(scratch)


@contextlib.contextmanager
def _gone_if_failed(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _remove(path)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _carried(path: Path, told: Manifest) -> Carried:
    found = {name.split("/")[2] for name in told.files if name.startswith("run/checkpoints/")}
    total = sum(content.bytes for content in told.files.values())
    return Carried(path=path, rows=told.rows, checkpoints=len(found), bytes=total)
