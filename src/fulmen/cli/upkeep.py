"""The commands for runs that are over or at rest: `fulmen gc`, `archive`, `restore`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from fulmen.launch.archive import Carried
    from fulmen.launch.gc import Collected

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


@click.command(no_args_is_help=True)
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=_RUN)
@click.option(
    "--keep-steps",
    type=click.IntRange(1),
    metavar="N",
    help="Steps that keep calls and spans, the newest; default: keep_rollouts of the run, or all.",
)
@click.option(
    "--checkpoints",
    type=click.IntRange(1),
    metavar="N",
    help="Checkpoints that stay, the newest; default: keep_checkpoints of the run.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@_STORE
def gc(
    runs: tuple[Path, ...],
    keep_steps: int | None,
    checkpoints: int | None,
    dry_run: bool,
    store: str | None,
) -> None:
    """Delete what runs no longer need, and give the room back to the disk.

    That is: calls and spans of old steps, old checkpoints, drafts that were never finished, and
    copies of stores that were migrated. Rewards, outcomes and metrics stay, and the run can be
    resumed as before.
    """
    from rich.console import Console

    from fulmen.launch.gc import collect

    for run in runs:
        done = collect(
            run, keep_steps=keep_steps, checkpoints=checkpoints, dry=dry_run, store=store
        )
        click.echo(done.run)
        Console().print(_table(done))
        if done.dry:
            click.echo("nothing was deleted (--dry-run)")
        elif done.on_server:
            click.echo("PostgreSQL uses the store's free room again by itself (autovacuum)")


def _table(done: "Collected") -> "Table":
    from rich.table import Table

    before, after = done.before, done.after
    table = Table("", box=None, header_style="bold", pad_edge=False)
    for name in ("before", "would be" if done.dry else "after"):
        table.add_column(name, justify="right")
    for name in ("calls", "spans"):
        rows = (getattr(state.store.rows, name) for state in (before, after))
        table.add_row(name, *(f"{number:,}" for number in rows))
    for name in ("checkpoints", "leftovers"):
        files = (getattr(state, name) for state in (before, after))
        table.add_row(name, *(f"{one.count} ({size(one.bytes)})" for one in files))
    later = "smaller" if done.dry else size(after.store.bytes)
    table.add_row("store", size(before.store.bytes), later)
    return table


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
