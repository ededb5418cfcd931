"""What is in an archive, and whether it is all there as it was written."""

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from fulmen.schema.codec import from_json, to_json
from fulmen.schema.errors import DataError
from fulmen.schema.records import Record

FILE = "manifest.json"
ARCHIVE = 1
"""Version of the layout: `tables/*.parquet`, and the run's files under `run/`."""


class Content(Record, frozen=True, kw_only=True):
    """One file."""

    bytes: int
    sha256: str


class Manifest(Record, frozen=True, kw_only=True):
    """The contents of an archive."""

    archive: int
    """Version of the layout."""
    store: int
    """Format of the store whose tables these are."""
    fulmen: str
    """Version that wrote it, for people."""
    run: str
    """Name of the run's folder."""
    created: float
    """Unix time, seconds."""
    rows: dict[str, int]
    """Of each table."""
    files: dict[str, Content]
    """By path within the archive, all but this one."""


def content_of(path: Path) -> Content:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        return Content(
            bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into its archive, last of all files."""
    folder.joinpath(FILE).write_bytes(to_json(manifest) + b"\n")


def read_manifest(folder: Path, name: Path) -> Manifest:
    """The manifest of an unpacked archive, which the user calls `name`.

    Raises:
        DataError: there is none, it is damaged, of a later version, or names files elsewhere.
    """
    try:
        manifest = from_json(Manifest, folder.joinpath(FILE).read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{name} is no archive of a run: it has no {FILE}",
            hint="give what fulmen archive wrote",
        ) from None
    except DataError as error:
        raise DataError(f"{name}: its {FILE} is damaged ({error.message})") from None
    if manifest.archive != ARCHIVE:
        raise DataError(f"{name}: written by a newer Fulmen", hint="upgrade Fulmen")
    check_names(manifest.files, name)
    return manifest


def check_names(paths: Iterable[str], name: Path) -> None:
    """Raise DataError for a path that leads out of the archive."""
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] not in ("tables", "run", FILE) or ".." in parts or "\\" in path:
            raise DataError(f"{name}: it names a file outside of itself ({path!r})")


def check_contents(folder: Path, manifest: Manifest, name: Path) -> None:
    """Raise DataError unless every file is there as it was written."""
    for path, expected in manifest.files.items():
        file = folder / path
        if not file.is_file():
            raise DataError(f"{name} is not whole: {path} is missing")
        if (found := file.stat().st_size) != expected.bytes:
            raise DataError(
                f"{name} is damaged: {path} has {found} bytes, and should have {expected.bytes}"
            )
        if content_of(file) != expected:
            raise DataError(f"{name} is damaged: {path} is not what was written")
