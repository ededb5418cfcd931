"""The commands for runs that are over or at rest: `fulmen gc`, `archive`, `restore`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fulmen.launch.archive import Carried

_RUN = click.Path(path_type=Path)
_STORE = click.option(
    "--store",
    metavar="URL",
    help="Address of its PostgreSQL server, if that has moved.",
)


@click.command(no_args_is_help=True)
@click.argument("run", type=_RUN)
@click.argument("out", type=_RUN)
@click.option(
    "--checkpoints",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    metavar="N",
    help="How many of the newest checkpoints to take along.",
)
@_STORE
def archive(run: Path, out: Path, checkpoints: int, store: str | None) -> None:
    """Write a run's record, settings and weights into a folder, or one file (OUT.zip).

    The record is in Parquet files, which pandas, DuckDB and others read. Nothing is lost.
    """
    from fulmen.launch.archive import archive as write

    click.echo(f"wrote {_told(write(run, out, checkpoints=checkpoints, store=store))}")


@click.command(no_args_is_help=True)
@click.argument("source", metavar="ARCHIVE", type=_RUN)
@click.argument("run", type=_RUN)
@click.option("--store", metavar="URL", help="PostgreSQL database for its record; default: run.db.")
def restore(source: Path, run: Path, store: str | None) -> None:
    """Make a run from what `fulmen archive` wrote, ready to be resumed."""
    from fulmen.launch.archive import restore as make

    made = make(source, run, store=store)
    click.echo(f"restored {_told(made)}")
    if made.checkpoints:
        click.echo(f"go on    fulmen train --config {run}/config.toml --resume")


def _told(done: "Carried") -> str:
    parts = [f"{done.rows[name]:,} {name}" for name in ("rollouts", "calls", "spans", "steps")]
    parts.append(f"{done.checkpoints} checkpoint{'' if done.checkpoints == 1 else 's'}")
    return f"{done.path}: {', '.join(parts)}, {size(done.bytes)}"


def size(number: int) -> str:
    """Bytes for people.

    >>> size(512), size(3_500_000)
    ('512 bytes', '3.3 MiB')
    """
    if number < 1024:
        return f"{number} bytes"
    value, unit = number / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:,.1f} {unit}"
