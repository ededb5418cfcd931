"""Tools that a model may call, in the form of chat completions."""

import re
from collections.abc import Mapping, Sequence

from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.form import ForcedCall
from fulmen.schema.records import JSON

_NAME = re.compile(r"[^\s\x00-\x1f\x7f\"'\\<>{}()|｜]{1,128}")
"""Formats put the name between marks of their own, and most cannot escape one in it."""


def check_names(tools: Sequence[Mapping[str, JSON]]) -> None:
    """Every tool must have a name of its own."""
    names = [tool["function"]["name"] for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestRefused(f"tools: there are two of the name {twice!r}", param="tools")


def check_function(function: Mapping[str, JSON], where: str, schema: str) -> None:
    """Check a tool's name and the JSON schema of its arguments, in the field `schema`."""
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestRefused(
            f"{where} must be a function with a name, without spaces, quotes or brackets",
            param=where,
        )
    if not isinstance(function.get(schema) or {}, dict):
        raise RequestRefused(f"{where}.{schema} must be a JSON schema", param=f"{where}.{schema}")


def function_tool(function: Mapping[str, JSON], schema: str) -> dict[str, JSON]:
    """A tool of another protocol, whose arguments are described in the field `schema`.

    >>> function_tool({"name": "add", "input_schema": {}, "cache_control": None}, "input_schema")
    {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}
    """
    kept = {name: function[name] for name in ("name", "description", "strict") if name in function}
    parameters = function.get(schema)
    kept["parameters"] = {} if parameters is None else parameters
    return {"type": "function", "function": kept}


def forced_call(names: Sequence[str], chosen: Sequence[str] | None = None) -> ForcedCall:
    """A call of one of `chosen` (None: any), which must be among the tools' names.

    >>> forced_call(["add", "find"], ["add"])
    ForcedCall(names=('add',))
    """
    if chosen is not None and not chosen:
        raise RequestRefused("tool_choice allows no tool", param="tool_choice")
    unknown = [name for name in chosen or () if name not in names]
    if unknown or not names:
        wrong = f"{unknown[0]!r}, which is not" if unknown else "a tool, but there is none"
        raise RequestRefused(f"tool_choice asks for {wrong} in tools", param="tool_choice")
    return ForcedCall(tuple(dict.fromkeys(chosen if chosen is not None else names)))


def callable_names(choice: JSON) -> tuple[str, ...] | None:
    """The tools that OpenAI's `tool_choice` leaves to be called: none, some, or all (None).

    >>> callable_names({"type": "allowed_tools", "mode": "auto", "tools": [
    ...     {"type": "function", "name": "find"}]})
    ('find',)
    """
    if choice == "none":
        return ()
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(allowed)}} | {
            "type": "allowed_tools",
            "tools": list(allowed),
        }:
            return tuple(tool_name(tool) for tool in allowed)
    return None


def tool_name(tool: JSON) -> str:
    """The name in a tool choice."""
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise RequestRefused("tool_choice.allowed_tools: a tool has no name", param="tool_choice")
