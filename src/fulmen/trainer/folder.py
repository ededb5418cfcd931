"""The folder of a run: its settings, its record, its metrics and its checkpoints.

runs/calc/
  config.toml       effective settings, each with where it came from
  run.db            the store, or
  store.url         where it is in PostgreSQL, without the password
  worker.key        what `fulmen work` needs to take part; admin.key does everything
  metrics.jsonl     one line a step, one line an evaluation
  checkpoints/step-000100/   a Hugging Face model folder, plus the optimiser
  checkpoints/step-000100/policies/writer/   the same of an agent's own policy
  reward.png        the reward curve
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from fulmen.schema.config import Settings
from fulmen.schema.errors import ConfigError
from fulmen.schema.place import without_password
from fulmen.schema.records import JSON
from fulmen.schema.role_keys import RoleKeys

_STORE_URL = "store.url"
_LOCK = "run.lock"
_WORKER_KEY, _ADMIN_KEY = "worker.key", "admin.key"


class RunFolder:
    """One run's files; at most one process owns a folder at a time."""

    def __init__(self, path: Path, lock: IO[str] | None) -> None:
        """`lock`: what keeps others out until it is closed; None: nobody else knows of it."""
        self.path = path
        self._lock = lock

    @property
    def database(self) -> Path:
        return self.path / "run.db"

    @property
    def store_url(self) -> str | None:
        """Where the store is, if that is not `database`; as it was noted, without a password."""
        file = self.path / _STORE_URL
        return file.read_text(encoding="utf-8").strip() if file.exists() else None

    def note_store(self, url: str) -> None:
        """Note where the store is, so that `--resume` finds it again."""
        (self.path / _STORE_URL).write_text(without_password(url) + "\n", encoding="utf-8")

    @property
    def worker_key(self) -> Path:
        return self.path / _WORKER_KEY

    def write_keys(self, keys: RoleKeys) -> None:
        """Keep the keys of those who use the store from elsewhere, for the folder's owner only."""
        for file, key in ((self.worker_key, keys.worker), (self.path / _ADMIN_KEY, keys.admin)):
            draft = file.with_suffix(".new")
            draft.unlink(missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as text:
                text.write(key + "\n")
            draft.replace(file)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        return self.path / "reward.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step lives."""
        return self.checkpoints / f"step-{step:06d}"

    def write_config(self, config: Settings, origins: Mapping[str, str]) -> None:
        """Write the effective settings, with the origin of each value as a comment."""
        lines = [
            f"{name} = {_toml(value)}  # {origins.get(name, 'default')}"
            for name, value in config.model_dump(mode="json").items()
            if value is not None
        ]
        self.path.joinpath("config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def append_metrics(self, line: Mapping[str, JSON]) -> None:
        """Add a line to metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, JSON]]:
        """All lines of metrics.jsonl; a last line cut off by a crash is left out."""
        if not self.metrics.exists():
            return []
        lines = []
        for text in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return lines

    def write_metrics(self, lines: Iterable[Mapping[str, JSON]]) -> None:
        """Have metrics.jsonl hold these lines and no others, all of them or none."""
        replacement = self.metrics.with_suffix(".new")
        text = "".join(json.dumps(line) + "\n" for line in lines)
        replacement.write_text(text, encoding="utf-8")
        replacement.replace(self.metrics)

    def write_summary(self, data: bytes) -> None:
        """Keep the end of the run, as JSON."""
        self.path.joinpath("summary.json").write_bytes(data + b"\n")

    def checkpoint_steps(self) -> list[int]:
        """Steps whose checkpoint is there as a whole, in order."""
        found = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return sorted(int(name) for name in found if name.isdecimal())

    def prune_checkpoints(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints, and drafts that were never finished."""
        drafts = sorted(self.checkpoints.glob("step-*.new"))
        whole = sorted(set(self.checkpoints.glob("step-*")) - set(drafts))
        for old in (*whole[:-keep], *drafts):
            shutil.rmtree(old)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            self._lock.close()


def _toml(value: JSON) -> str:
    """A value as TOML writes it.

    >>> _toml({"f1": 0.9})
    '{ "f1" = 0.9 }'
    """
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def open_folder(wanted: str | None, name: str, if_exists: str) -> tuple[RunFolder, bool]:
    """Make or reopen a run folder; returns it and whether it is to be resumed.

    `name` makes the default `runs/<name>-<time>`. An existing run is never overwritten.

    Raises:
        ConfigError: the folder exists and `if_exists` is "fail", it belongs to a running process,
            or it cannot be made.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(wanted) if wanted else Path("runs") / f"{name}-{stamp}"
    exists = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if exists and if_exists == "fail":
        raise ConfigError(
            f"{path} exists already",
            hint="--resume goes on with it, --if-exists new takes a new name, --out names another",
        )
    if exists and if_exists == "new":
        path = _next_free(path)
    resume = exists and if_exists == "resume"
    if resume:
        return take_folder(path), True
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used as run folder ({error.strerror})") from error
    return RunFolder(path, _lock(path)), False


def take_folder(path: Path) -> RunFolder:
    """Have the folder of an existing run for oneself.

    Raises:
        ConfigError: it is none, it belongs to a running process, or it cannot be used.
    """
    if not any((path / name).exists() for name in ("run.db", _STORE_URL)):
        raise ConfigError(
            f"{path} is not the folder of a run: it has no run.db and no {_STORE_URL}"
        )
    return RunFolder(path, _lock(path))


def is_own_file(name: str) -> bool:
    """Whether a file in a run's folder belongs to that folder alone: the store, its keys, the lock,
    drafts.

    >>> is_own_file("run.db-wal"), is_own_file("admin.key"), is_own_file("metrics.jsonl")
    (True, True, False)
    """
    alone = (_STORE_URL, _LOCK, _WORKER_KEY, _ADMIN_KEY)
    return name.startswith("run.db") or name in alone or name.endswith(".new")


def _next_free(path: Path) -> Path:
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate


def _lock(path: Path) -> IO[str]:
    try:
        lock = (path / _LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"{path} cannot be used as run folder ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(f"{path} is in use by process {owner}", hint="wait, or stop it") from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
