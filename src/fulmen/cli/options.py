"""Command-line options made from the settings, and settings made from options and a TOML file."""

import difflib
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from fulmen.schema.config import Repeated, Settings, make_config
from fulmen.schema.errors import ConfigError

S = TypeVar("S", bound=Settings)


class Loaded(Generic[S]):
    """Settings, and where each value came from."""

    def __init__(self, config: S, origins: Mapping[str, str]) -> None:
        self.config = config
        self.origins = origins


class SettingsCommand(click.Command):
    """A command whose options are the fields of a settings class."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            _refuse_option(error, [opt for p in self.params for opt in p.opts])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        if any(getattr(p, "hidden", False) for p in self.params):
            formatter.write_paragraph()
            formatter.write_text("More settings: --help-all")


def _refuse_option(error: click.NoSuchOption, known: Sequence[str]) -> NoReturn:
    close = difflib.get_close_matches(error.option_name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "--help-all shows all flags"
    raise ConfigError(f"there is no flag {error.option_name}", hint=hint) from None


def settings_options(kind: type[Settings]) -> list[click.Parameter]:
    """One option a field, the common ones shown, plus `--config` and `--help-all`."""
    common = kind.common_fields()
    options: list[click.Parameter] = [
        _option(name, field, hidden=name not in common) for name, field in kind.model_fields.items()
    ]
    options.append(
        click.Option(
            ["--config", "config_file"],
            metavar="FILE",
            help="TOML file with settings of the same names; flags win over it.",
        )
    )
    options.append(
        click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_help_all,
            hidden=True,
        )
    )
    return options


def _option(name: str, field: FieldInfo, *, hidden: bool) -> click.Option:
    flag = "--" + name.replace("_", "-")
    text = " ".join((field.description or "").replace("`", "").split())
    if field.default not in (None, ..., {}, ()) and not field.is_required():
        many = isinstance(field.default, tuple)
        text += f" [default: {','.join(field.default) if many else field.default}]"
    repeated = next((mark for mark in field.metadata if isinstance(mark, Repeated)), None)
    if repeated is not None:
        many = [f"--{repeated.flag}", name]
        return click.Option(many, multiple=True, metavar="TEXT", help=text, hidden=hidden)
    kind = _plain_type(field.annotation)
    if kind is bool:
        return click.Option(
            [f"{flag}/--no-{flag[2:]}", name], default=None, help=text, hidden=hidden
        )
    if get_origin(kind) is Literal:
        choice = click.Choice([str(value) for value in get_args(kind)])
        return click.Option([flag, name], type=choice, default=None, help=text, hidden=hidden)
    # Checked by the settings class, whose messages name the field and the bounds.
    metavar = {int: "N", float: "X", str: "TEXT"}.get(kind, "TEXT")
    return click.Option([flag, name], default=None, metavar=metavar, help=text, hidden=hidden)


def _plain_type(annotation: Any) -> Any:  # noqa: ANN401 - any annotation of a settings field
    """`int` of `int | None`, and of `Annotated[int, …]`."""
    if get_origin(annotation) is typing.Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (UnionType, typing.Union):
        return next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def _help_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    options = [p for p in ctx.command.params if isinstance(p, click.Option) and p.hidden]
    for option in options:
        option.hidden = option.name == "help_all"
    click.echo(ctx.get_help())
    for option in options:
        option.hidden = True
    ctx.exit()


def load_settings(kind: type[S], flags: Mapping[str, object], config_file: str | None) -> Loaded[S]:
    """Merge a TOML file and flags; flags win.

    Raises:
        ConfigError: the file cannot be read, or a value cannot be used; in one line.
    """
    from_file = read_toml(Path(config_file)) if config_file else {}
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    if config_file:
        # Complains about the file's keys with the file's name.
        unknown = {key: value for key, value in from_file.items() if key not in kind.model_fields}
        if unknown:
            make_config(kind, unknown, origin=config_file)
    config = make_config(kind, {**from_file, **given}, origin=config_file or "settings")
    origins = dict.fromkeys(kind.model_fields, "default")
    origins |= dict.fromkeys(from_file, config_file or "") | dict.fromkeys(given, "flag")
    return Loaded(config, origins)


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError naming file and reason."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", hint="check --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None
