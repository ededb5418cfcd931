"""Fields of a JSON body, checked: the value, or None where it was not given.

Every function raises RequestRefused with a message that names the field.
"""

from collections.abc import Mapping
from typing import cast

from fulmen.gateway.errors import RequestRefused
from fulmen.schema.records import JSON

Body = Mapping[str, JSON]


OTHER_SAMPLING = ("frequency_penalty", "presence_penalty", "logit_bias")
"""They would bend the distribution that log-probabilities are recorded under."""


def refuse(body: Body, *names: str) -> None:
    """Fields that would change what is meant, and that nothing here does; 0 and empty are no wish.

    >>> refuse({"presence_penalty": 0.0}, "presence_penalty")
    """
    for name in names:
        if body.get(name):
            raise RequestRefused(f"{name} is not supported", param=name)


def body_object(body: JSON) -> Body:
    """The body itself."""
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    return body


def string(body: Body, name: str, *, required: bool = False) -> str | None:
    """Text."""
    value = body.get(name)
    if value is None and not required:
        return None
    if not isinstance(value, str):
        raise RequestRefused(f"{name} must be a string", param=name)
    return value


def required_string(body: Body, name: str) -> str:
    """Text that must be there."""
    return cast("str", string(body, name, required=True))


def flag(body: Body, name: str) -> bool:
    """True or false; missing is false."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestRefused(f"{name} must be true or false", param=name)
    return bool(value)


def mapping(body: Body, name: str) -> Body:
    """An object; missing is empty."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestRefused(f"{name} must be an object", param=name)
    return value or {}


def listing(body: Body, name: str) -> list[JSON]:
    """A list; missing is empty."""
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise RequestRefused(f"{name} must be a list", param=name)
    return value or []


def objects(body: Body, name: str) -> list[dict[str, JSON]]:
    """A list of objects; missing is empty."""
    values = listing(body, name)
    for place, value in enumerate(values):
        if not isinstance(value, dict):
            raise RequestRefused(f"{name}[{place}] must be an object", param=f"{name}[{place}]")
    return values


def strings(body: Body, name: str) -> tuple[str, ...]:
    """One text or a list of texts, none of them empty."""
    value = body.get(name)
    values = [value] if isinstance(value, str) else value or []
    if not isinstance(values, list) or not all(isinstance(s, str) and s for s in values):
        raise RequestRefused(f"{name} must be a string or a list of strings", param=name)
    return tuple(values)


def integer(
    body: Body, name: str, *, low: int | None = None, high: int | None = None
) -> int | None:
    """A whole number within bounds."""
    value = body.get(name)
    if value is None:
        return None
    fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits or (low is not None and value < low) or (high is not None and value > high):
        raise RequestRefused(f"{name} must be an integer{_bounds(low, high)}", param=name)
    return value


def number(
    body: Body, name: str, *, low: float | None = None, high: float | None = None
) -> float | None:
    """A number within bounds."""
    value = body.get(name)
    if value is None:
        return None
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or (low is not None and value < low) or (high is not None and value > high):
        raise RequestRefused(f"{name} must be a number{_bounds(low, high)}", param=name)
    return float(value)


def _bounds(low: float | None, high: float | None) -> str:
    if low is None:
        return "" if high is None else f" of at most {high:g}"
    return f" from {low:g}" + (" on" if high is None else f" to {high:g}")
