"""Whether a value fits a JSON schema, as far as schemas of tools go."""

import re
from collections.abc import Callable, Mapping

from fulmen.schema.records import JSON


def _is_integer(value: JSON) -> bool:
    """1.0 is one, too; True is none."""
    whole = isinstance(value, float) and value.is_integer()
    return whole or (isinstance(value, int) and not isinstance(value, bool))


_TYPES: Mapping[str, Callable[[JSON], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "integer": _is_integer,
}


def fits(value: JSON, schema: JSON) -> bool:
    """Checks type, enum, const, required, properties, additionalProperties, items, anyOf, oneOf,
    allOf and `$ref` within the schema; keywords beyond these forbid nothing.

    >>> wanted = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    >>> fits({"n": 3}, wanted), fits({"n": "3"}, wanted), fits({}, wanted)
    (True, False, False)
    """
    return _fits(value, schema, schema, depth=0)


def _fits(value: JSON, schema: JSON, root: JSON, *, depth: int) -> bool:
    # A schema may refer to itself without ever taking anything off the value.
    if not isinstance(schema, dict) or depth > 64:
        return schema is not False

    def inner(item: JSON, part: JSON) -> bool:
        return _fits(item, part, root, depth=depth + 1)

    if "$ref" in schema and not inner(value, _referred(schema["$ref"], root)):
        return False
    if not _simple(value, schema):
        return False
    if not all(inner(value, part) for part in _list(schema, "allOf")):
        return False
    for keyword in ("anyOf", "oneOf"):
        choices = _list(schema, keyword)
        if choices and not any(inner(value, part) for part in choices):
            return False
    if isinstance(value, dict):
        return _object_fits(value, schema, inner)
    if isinstance(value, list) and "items" in schema:
        return all(inner(item, schema["items"]) for item in value)
    return True


def _simple(value: JSON, schema: Mapping[str, JSON]) -> bool:
    named = schema.get("type")
    kinds = [named] if isinstance(named, str) else _list(schema, "type")
    if kinds and not any(_TYPES.get(str(kind), lambda _: True)(value) for kind in kinds):
        return False
    allowed = _list(schema, "enum")
    if allowed and value not in allowed:
        return False
    return "const" not in schema or value == schema["const"]


def _object_fits(
    value: Mapping[str, JSON], schema: Mapping[str, JSON], inner: Callable[[JSON, JSON], bool]
) -> bool:
    if any(name not in value for name in _list(schema, "required")):
        return False
    known = schema.get("properties")
    known = known if isinstance(known, dict) else {}
    others = schema.get("additionalProperties", True)
    return all(inner(item, known.get(name, others)) for name, item in value.items())


def _list(schema: Mapping[str, JSON], keyword: str) -> list[JSON]:
    """Empty where a schema is not as it must be: that forbids nothing."""
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _referred(reference: JSON, root: JSON) -> JSON:
    """`#/$defs/name` within the schema; anything else forbids nothing."""
    found = root
    for part in re.findall(r"(?<=/)[^/]+", str(reference)):
        found = found.get(part, True) if isinstance(found, dict) else True
    return found
