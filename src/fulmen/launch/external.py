"""Models elsewhere that agents may ask for by name, as a user lists them.

[judge]
base_url = "https://api.openai.com/v1"
model = "gpt-4.1-mini"              # its name there; left out: the same
api_key_env = "OPENAI_API_KEY"      # the variable that holds the key; left out: none is sent
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from fulmen.gateway.external import External
from fulmen.schema.config import Settings, make_config
from fulmen.schema.errors import ConfigError


class _Entry(Settings):
    """One model's table."""

    base_url: str = Field(pattern=r"^https?://[^/]")
    """With `/v1`, where its paths have one."""
    model: str | None = None
    """Its name there."""
    api_key_env: str | None = None
    """The environment variable that holds its key."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long an answer may take, seconds."""


def read_external(file: str | None) -> Mapping[str, External]:
    """Read the list; no file, no models.

    Raises:
        ConfigError: the file, a table or a variable is not there or not as it must be.
    """
    if file is None:
        return {}
    try:
        tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file", hint="check --external-models") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML ({error})") from None
    return {name: _external(file, name, table) for name, table in tables.items()}


def _external(file: str, name: str, table: object) -> External:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {name} must be a table", hint=f"write [{name}] above its keys")
    entry = make_config(_Entry, table, origin=f"{file}: [{name}]", flags=False)
    key = ""
    if entry.api_key_env is not None:
        key = os.environ.get(entry.api_key_env, "")
        if not key:
            raise ConfigError(
                f"{file}: [{name}]: the environment variable {entry.api_key_env} is not set",
                hint="set it to the key, or leave out api_key_env",
            )
    return External(entry.base_url, entry.model or name, key, entry.timeout_s)
