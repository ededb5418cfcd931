"""The commands: `fulmen train`, `eval`, `serve`, `work`, `export`; others are in
`fulmen.cli.upkeep`.

Everything heavy is imported inside the commands, so that `--help` answers at once.
"""

import errno
import logging
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import click

from fulmen.cli import upkeep
from fulmen.cli.options import Loaded, SettingsCommand, load_settings, settings_options
from fulmen.schema.config import EvalConfig, ServeConfig, WorkConfig
from fulmen.schema.errors import (
    AgentError,
    ConfigError,
    DataError,
    FulmenError,
    GraderError,
    ModelError,
)
from fulmen.schema.training import TrainConfig

_USERS = (ConfigError, DataError, ModelError, AgentError, GraderError)
"""Errors that the user can mend; exit status 2, others 1."""
_INTERRUPTED = 130
_TRAIN_EXTRA = ("torch", "transformers", "renderers", "safetensors", "matplotlib")


@click.group(context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 96})
@click.version_option(package_name="fulmen")
def cli() -> None:
    """Train any AI agent with reinforcement learning."""


def _train(config_file: str | None, resume: bool, as_json: bool, **flags: object) -> None:
    """Train the model behind an agent.

    The agent is an ordinary program that calls OpenAI's interface; it is not changed.
    """
    from fulmen.cli.console import make_display
    from fulmen.engine.platform import place
    from fulmen.launch.train import train

    if resume:
        flags["if_exists"] = "resume"
    loaded: Loaded[TrainConfig] = load_settings(TrainConfig, flags, config_file)
    if place()[0] > 0:  # one of the processes beside the first, which speaks for all
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        train(loaded.config, listen=lambda _: None)
        return
    stop = threading.Event()
    _stop_on_interrupt(stop)
    with make_display(as_json=as_json) as display:
        done = train(loaded.config, listen=display.show, stop=stop, origins=loaded.origins)
    if not as_json:
        from rich.console import Console

        from fulmen.cli.report import closing_lines, final_report

        Console().print(final_report(done))
        for line in closing_lines(done, loaded.config):
            click.echo(line)
    if done.stopped:
        sys.exit(_INTERRUPTED)


def _eval(config_file: str | None, as_json: bool, **flags: object) -> None:
    """Measure a model on tasks, through the same agent and grader as in training."""
    from rich.console import Console

    from fulmen.cli.console import make_display
    from fulmen.cli.report import print_eval
    from fulmen.launch.evaluate import evaluate

    loaded: Loaded[EvalConfig] = load_settings(EvalConfig, flags, config_file)
    with make_display(as_json=as_json) as display:
        done, won, lost = evaluate(loaded.config, listen=display.show)
    if not as_json:
        print_eval(Console(), done, won, lost)


def _serve(config_file: str | None, **flags: object) -> None:
    """Serve a model behind OpenAI's and Anthropic's protocols."""
    from fulmen.launch.serve import serve

    loaded: Loaded[ServeConfig] = load_settings(ServeConfig, flags, config_file)

    def ready(url: str, key: str) -> None:
        click.echo(f"serving {loaded.config.model}")
        click.echo(f"export OPENAI_BASE_URL={url}")
        click.echo(f"export OPENAI_API_KEY={key}")
        click.echo(f"export ANTHROPIC_BASE_URL={url.removesuffix('/v1')}")
        click.echo(f"export ANTHROPIC_API_KEY={key}")
        click.echo("Ctrl-C ends it")

    try:
        serve(loaded.config, ready=ready)
    except KeyboardInterrupt:
        click.echo("\nended")


def _work(config_file: str | None, **flags: object) -> None:
    """Run agents here for a run on another machine.

    Needs the URL that `fulmen train` prints, and the key in worker.key of the run's folder.
    """
    from fulmen.launch.work import work

    loaded: Loaded[WorkConfig] = load_settings(WorkConfig, flags, config_file)
    config = loaded.config
    logging.basicConfig(format="%(message)s", level=logging.WARNING)

    def ready() -> None:
        click.echo(f"working for {config.server}, {config.workers} agents at once; Ctrl-C ends it")

    def hint(text: str) -> None:
        click.echo(f"note: {text}")

    worked = work(config, ready=ready, hint=hint)
    counters = worked.counters
    failures = ", ".join(f"{count} {kind}" for kind, count in sorted(counters.failures.items()))
    how = "the run is over" if worked.run_over else "ended"
    click.echo(f"{how}; {counters.finished} attempts, failures: {failures or 'none'}")


_RESUME = click.Option(["--resume"], is_flag=True, help="Go on with the run in --out.")
_JSON = click.Option(
    ["--json", "as_json"], is_flag=True, help="Print events as JSON lines.", hidden=True
)

for _name, _run, _kind, _extra in (
    ("train", _train, TrainConfig, [_RESUME, _JSON]),
    ("eval", _eval, EvalConfig, [_JSON]),
    ("serve", _serve, ServeConfig, []),
    ("work", _work, WorkConfig, []),
):
    cli.add_command(
        SettingsCommand(
            _name,
            callback=_run,
            params=[*settings_options(_kind), *_extra],
            help=_run.__doc__,
            no_args_is_help=True,
        )
    )


@cli.command(no_args_is_help=True)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def export(checkpoint: Path, out: Path) -> None:
    """Make a checkpoint into a model folder for transformers, vLLM and others.

    An adapter is merged into its model; weights trained in float32 are written in float32.
    """
    from fulmen.launch.export import export as write

    write(checkpoint, out)
    click.echo(f"wrote {out}")


for _command in (upkeep.archive, upkeep.restore, upkeep.gc):
    cli.add_command(_command)


def _stop_on_interrupt(stop: threading.Event) -> None:
    """First Ctrl-C: finish the step and save. Second: end now."""

    def interrupted(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        click.echo("\nfinishing this step and saving; Ctrl-C again ends at once", err=True)

    signal.signal(signal.SIGINT, interrupted)


def main() -> None:
    """Entry point: every error is one line and a status."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        cli.main(arguments, prog_name="fulmen", standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message().rstrip("."), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted; what was committed can be resumed with --resume", _INTERRUPTED)
    except FulmenError as error:
        if debug:
            traceback.print_exc()
        _fail(str(error), 2 if isinstance(error, _USERS) else 1)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in _TRAIN_EXTRA:
            _fail(f'{error.name} is not installed; pip install "fulmen[train]"', 2)
        _fail(f"{type(error).__name__}: {error}{_keep_traceback(debug)}", 1)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            place = error.filename or "the run's disk"
            _fail(f"{place}: no space left on device; free some, then go on with --resume", 1)
        _fail(f"{type(error).__name__}: {error}{_keep_traceback(debug)}", 1)
    except Exception as error:
        _fail(f"{type(error).__name__}: {error}{_keep_traceback(debug)}", 1)


def _fail(text: str, status: int) -> None:
    """Say what is wrong on one line, and end."""
    click.echo("error: " + " ".join(text.split()), err=True)
    sys.exit(status)


def _keep_traceback(debug: bool) -> str:
    """A bug of ours: keep its traceback where it can be found."""
    if debug:
        traceback.print_exc()
        return ""
    file = Path(tempfile.mkdtemp(prefix="fulmen-")) / "traceback.txt"
    file.write_text(traceback.format_exc(), encoding="utf-8")
    return f" (traceback: {file})"


if __name__ == "__main__":
    main()
