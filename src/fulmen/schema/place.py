"""Where a store is: URLs of PostgreSQL databases, and what of them may be written down."""

import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

SCHEMES = ("postgresql", "postgres")
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
"""Names that PostgreSQL takes without quotes, as long as it takes any."""


def is_url(place: str) -> bool:
    """Whether a store's place is a database server, not a file.

    >>> is_url("postgresql://db/fulmen"), is_url("runs/calc/run.db")
    (True, False)
    """
    return place.partition("://")[0] in SCHEMES and "://" in place


def checked_url(place: str) -> str:
    """The same URL, if it is one.

    Raises:
        ValueError: it is no URL of a database, or its schema's name cannot be one.
    """
    if not is_url(place) or not urlsplit(place).path.strip("/"):
        raise ValueError("write postgresql://user@host/database")
    name = schema_of(place)
    if name is not None and not _SCHEMA.fullmatch(name):
        raise ValueError(f"schema {name!r}: use a-z, 0-9 and _, at most 63 of them")
    return place


def without_password(url: str) -> str:
    """The URL as it may be shown and kept.

    >>> without_password("postgresql://me:secret@db:5432/fulmen?schema=calc&sslmode=require")
    'postgresql://me@db:5432/fulmen?schema=calc&sslmode=require'
    """
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    kept = [(name, value) for name, value in parse_qsl(parts.query) if name != "password"]
    netloc = user.partition(":")[0] + at + hosts
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(kept, safe="/:")))


def schema_of(url: str) -> str | None:
    """The schema (namespace) that a URL names for the store's tables.

    >>> schema_of("postgresql://db/fulmen?schema=calc")
    'calc'
    """
    return dict(parse_qsl(urlsplit(url).query)).get("schema")


def without_schema(url: str) -> str:
    """The URL that PostgreSQL's own tools understand.

    >>> without_schema("postgresql://db/fulmen?schema=calc&sslmode=require")
    'postgresql://db/fulmen?sslmode=require'
    """
    parts = urlsplit(url)
    kept = [(name, value) for name, value in parse_qsl(parts.query) if name != "schema"]
    return urlunsplit(parts._replace(query=urlencode(kept, safe="/:")))


def with_schema(url: str, name: str) -> str:
    """The URL, with the schema's name where it has none.

    >>> with_schema("postgresql://db/fulmen", "calc")
    'postgresql://db/fulmen?schema=calc'
    """
    if schema_of(url) is not None:
        return url
    parts = urlsplit(url)
    query = f"{parts.query}&schema={name}" if parts.query else f"schema={name}"
    return urlunsplit(parts._replace(query=query))


def schema_name(run: str, mark: str) -> str:
    """A schema's name for a run, from its folder's name and a mark that no other run has.

    >>> schema_name("Calc-20261121 (2)", "3f9a1c")
    'fulmen_calc_20261121_2_3f9a1c'
    """
    word = re.sub(r"[^a-z0-9]+", "_", run.lower()).strip("_")
    return f"fulmen_{word[:40]}_{mark}".replace("__", "_")
