"""Models beside the one that is trained, as a user lists them: elsewhere, or frozen, served here.

[judge]
base_url = "https://api.openai.com/v1"
model = "gpt-4.1-mini"              # its name there; left out: the same
api_key_env = "OPENAI_API_KEY"      # the variable that holds the key; left out: none is sent

[checker]
folder = "path/or/hub-id"           # served beside the policy, never trained
agents = ["checker", "plan*"]       # whatever model these ask for, they get this one
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from fulmen.gateway.external import External
from fulmen.gateway.models import Models
from fulmen.launch.policy import PolicySource, ServedPolicy
from fulmen.schema.config import Settings, make_config
from fulmen.schema.errors import ConfigError


class _Entry(Settings):
    """What both kinds of tables may say."""

    agents: tuple[str, ...] = ()
    """Names of the agents that it is the model of, `*` for any characters."""


class _Elsewhere(_Entry):
    """A model behind an endpoint."""

    base_url: str = Field(pattern=r"^https?://[^/]")
    """With `/v1`, where its paths have one."""
    model: str | None = None
    """Its name there."""
    api_key_env: str | None = None
    """The environment variable that holds its key."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long an answer may take, seconds."""


class _Frozen(_Entry):
    """A model that is loaded and served here."""

    folder: str
    """Folder or Hub id."""


@dataclass(frozen=True, slots=True)
class OtherModels:
    """The list, checked; nothing is loaded yet."""

    file: str = ""
    elsewhere: tuple[External, ...] = ()
    folders: Mapping[str, str] = field(default_factory=dict)
    """Of frozen models, by name."""
    agents: tuple[tuple[str, str], ...] = ()
    """Patterns of agents' names, each with its model's."""


def read_others(file: str | None) -> OtherModels:
    """Read the list; no file, no models.

    Raises:
        ConfigError: the file, a table or a variable is not there or not as it must be.
    """
    if file is None:
        return OtherModels()
    try:
        tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file", hint="check --other-models") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML ({error})") from None
    entries = {name: _entry(file, name, table) for name, table in tables.items()}
    return OtherModels(
        file,
        tuple(_external(file, n, e) for n, e in entries.items() if isinstance(e, _Elsewhere)),
        {name: entry.folder for name, entry in entries.items() if isinstance(entry, _Frozen)},
        tuple((agent, name) for name, entry in entries.items() for agent in entry.agents),
    )


def _entry(file: str, name: str, table: object) -> _Elsewhere | _Frozen:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {name} must be a table", hint=f"write [{name}] above its keys")
    kind = _Frozen if "folder" in table else _Elsewhere
    neither = "base_url" not in table and set(table) <= set(_Elsewhere.model_fields)
    if neither if kind is _Elsewhere else "base_url" in table:
        raise ConfigError(
            f"{file}: [{name}] must have either base_url or folder",
            hint="base_url is that of a model elsewhere, folder is loaded and served here",
        )
    return make_config(kind, table, origin=f"{file}: [{name}]", flags=False)


def _external(file: str, name: str, entry: _Elsewhere) -> External:
    key = ""
    if entry.api_key_env is not None:
        key = os.environ.get(entry.api_key_env, "")
        if not key:
            raise ConfigError(
                f"{file}: [{name}]: the environment variable {entry.api_key_env} is not set",
                hint="set it to the key, or leave out api_key_env",
            )
    return External(name, entry.base_url, entry.model or name, key, entry.timeout_s)


def check_names(sources: Sequence[PolicySource], others: OtherModels) -> None:
    """Raises ConfigError if another model has a policy's name."""
    others_names = {*others.folders, *(model.name for model in others.elsewhere)}
    if taken := [source.name for source in sources if source.name in others_names]:
        raise ConfigError(
            f"{others.file}: [{taken[0]}] has the name of a model that is trained",
            hint="give it another",
        )


def frozen_sources(others: OtherModels) -> list[PolicySource]:
    """Those that are loaded and served here."""
    return [PolicySource(name, folder) for name, folder in others.folders.items()]


def all_models(
    policies: Sequence[ServedPolicy], frozen: Sequence[ServedPolicy], others: OtherModels
) -> Models:
    """All models by name. Any other name means the first policy: an unchanged agent asks for
    whatever it always did. An agent that fits a policy and another model has the policy.
    """
    own = [served.as_policy() for served in policies]
    agents = [(agent, one.source.name) for one in policies for agent in one.source.agents]
    return Models(
        [*own, *(served.as_policy(frozen=True) for served in frozen)],
        others.elsewhere,
        default=own[0].name,
        agents=[*agents, *others.agents],
    )
