"""The store of a run: a file in its folder, or a schema of its own in a PostgreSQL database."""

import secrets

from fulmen.schema.errors import ConfigError
from fulmen.schema.place import schema_name, schema_of, with_schema, without_password
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore
from fulmen.trainer.folder import RunFolder


def open_record(folder: RunFolder, place: str | None) -> SqlStore:
    """Open the store of a run, where its folder says it is; else make it in `place`, and note that.

    A schema that is not named gets a name that no other run has.

    Raises:
        ConfigError: the run's store is elsewhere.
        StoreError: it cannot be opened, or `place` holds another run.
    """
    if folder.store_url is not None:
        return open_store(place_of(folder, place), new=False)
    if place is None:
        return open_store(folder.database)
    if folder.database.exists():
        raise _elsewhere(folder, place)
    url = with_schema(place, schema_name(folder.path.name, secrets.token_hex(3)))
    store = open_store(url, new=True)
    folder.note_store(url)
    return store


def place_of(folder: RunFolder, place: str | None) -> str:
    """Where the store of an existing run is; `place`: its server has moved, or asks for a password.

    Raises:
        ConfigError: the run's store is elsewhere.
    """
    noted = folder.store_url
    if noted is not None:
        return _again(folder, noted, place)
    if place is not None:
        raise _elsewhere(folder, place)
    return str(folder.database)


def _elsewhere(folder: RunFolder, place: str) -> ConfigError:
    return ConfigError(
        f"{folder.path}: its store is run.db, not {without_password(place)}",
        hint="leave --store out, or begin another run",
    )


def _again(folder: RunFolder, noted: str, place: str | None) -> str:
    """Where the store of an older run is, now: its server may have moved, its schema has not."""
    if place is None:
        return noted
    schema = schema_of(noted) or ""
    url = with_schema(place, schema)
    if schema_of(url) != schema:
        raise ConfigError(
            f"{folder.path}: its store is in schema {schema}, not {schema_of(url)}",
            hint="leave the schema out, or begin another run",
        )
    return url
