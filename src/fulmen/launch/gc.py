"""`fulmen gc`: what a run no longer needs is deleted, and the room is given back."""

import asyncio
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fulmen.launch.record import place_of
from fulmen.schema.place import is_url
from fulmen.schema.records import Split, StepRecord
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store
from fulmen.store.upkeep import Extent, compact, extent_of, what_would_go
from fulmen.trainer.folder import RunFolder, take_folder
from fulmen.trainer.history import saved_steps
from fulmen.trainer.retention import last_needless

_KEPT: int = TrainConfig.model_fields["keep_checkpoints"].default
"""Checkpoints, where the run does not say how many."""


@dataclass(frozen=True, slots=True)
class Files:
    """A number of files or folders, and what they hold."""

    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class State:
    """How much there is of a run."""

    store: Extent
    checkpoints: Files
    leftovers: Files
    """Drafts that were never finished, checkpoints of steps that are not on record, and copies of
    stores that were migrated."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of a run."""

    run: Path
    before: State
    after: State
    """After a dry run: what would be there; the size of its store is not known then."""
    dry: bool
    on_server: bool
    """The store is in PostgreSQL, which uses the room again by itself."""


@dataclass(frozen=True, slots=True)
class _Plan:
    ends: Mapping[Split, int]
    """The last steps whose calls and spans go."""
    old: list[Path]
    """Checkpoints that go."""
    kept: list[Path]
    leftovers: list[Path]


def collect(
    run: Path,
    *,
    keep_steps: int | None = None,
    checkpoints: int | None = None,
    dry: bool = False,
    store: str | None = None,
) -> Collected:
    """Delete what a run no longer needs; a resumed one goes on as if nothing had been deleted.

    Args:
        run: its folder.
        keep_steps: steps that keep their calls and spans, the newest; None: as its settings say.
        checkpoints: how many stay, the newest; None: as its settings say.
        dry: only look.
        store: address of its PostgreSQL server, if that has moved.

    Raises:
        ConfigError: it is no run's folder, or it is in use.
        StoreError: its store cannot be read or written.
    """
    with take_folder(run) as folder:
        return asyncio.run(_collect(folder, keep_steps, checkpoints, dry, store))


async def _collect(
    folder: RunFolder, keep: int | None, checkpoints: int | None, dry: bool, url: str | None
) -> Collected:
    place, given = place_of(folder, url), _settings(folder)
    most = checkpoints or given.get("keep_checkpoints") or _KEPT
    # Looked for before the store is opened, which may migrate it: that copy stays.
    drafts = _drafts(folder)
    store = open_store(place, new=False)
    try:
        plan = _plan(folder, await store.steps(), keep or given.get("keep_rollouts"), most, drafts)
        extent = await asyncio.to_thread(extent_of, place)
        going = await asyncio.to_thread(what_would_go, place, plan.ends if dry else {})
        before = State(extent, _files([*plan.old, *plan.kept]), _files(plan.leftovers))
        after = State(extent.without(going), _files(plan.kept), _files([]))
        for split, end in plan.ends.items() if not dry else ():
            await store.forget(split, 0, end)
    finally:
        await store.close()
    if not dry:
        for path in (*plan.old, *plan.leftovers):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        await asyncio.to_thread(compact, place)
        after = replace(after, store=await asyncio.to_thread(extent_of, place))
    return Collected(folder.path, before, after, dry, is_url(place))


def _plan(
    folder: RunFolder,
    steps: Sequence[StepRecord],
    keep: int | None,
    most: int,
    drafts: Sequence[Path],
) -> _Plan:
    saved = [folder.path / str(record.checkpoint) for record in saved_steps(folder, steps)]
    orphans = sorted(set(folder.checkpoints.glob("step-*")) - {*saved, *drafts})
    kept, ends = saved[-most:], {}
    if keep is not None and steps:
        back_to = [record.step for record in saved_steps(folder, steps)[-most:]]
        ends = last_needless(steps[-1].step, keep, back_to)
    return _Plan(ends, saved[:-most], kept, [*drafts, *orphans])


def _drafts(folder: RunFolder) -> list[Path]:
    """What was never finished, and copies of stores that were migrated since."""
    patterns = ("*.new", "checkpoints/step-*.new", "run.db.format-*")
    return sorted({path for pattern in patterns for path in folder.path.glob(pattern)})


def _settings(folder: RunFolder) -> dict[str, Any]:
    """What the run was begun with; nothing, if it does not say."""
    try:
        return tomllib.loads((folder.path / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _files(paths: Iterable[Path]) -> Files:
    paths = list(paths)
    inside = (file for path in paths for file in (path, *path.rglob("*")) if file.is_file())
    return Files(len(paths), sum(file.stat().st_size for file in inside))
