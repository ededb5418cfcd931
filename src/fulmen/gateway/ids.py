"""Ids that say which call they come from.

A response and every tool call in it carry the same 24 random characters. So a span that holds any
of these ids (`gen_ai.response.id`, `gen_ai.tool.call.id`) is joined to its call with no header.
"""

import re
import secrets
from typing import NamedTuple

_MINTED = re.compile(
    r"(?:chatcmpl-|cmpl-|resp_|msg_|call_|fc_|rs_)([0-9a-f]{24})(?:-(\d+)|([0-9a-f]{2})[0-9a-f]{2})?"
)


class Origin(NamedTuple):
    """One completion."""

    request: str
    choice: int


def mint() -> str:
    """The random part of a request's ids."""
    return secrets.token_hex(12)


def call_id(prefix: str, request: str, choice: int) -> str:
    """Id of a completion: that of the response for the first, numbered for the others.

    >>> call_id("chatcmpl-", "0123456789abcdef01234567", 1)
    'chatcmpl-0123456789abcdef01234567-1'
    """
    return f"{prefix}{request}" if choice == 0 else f"{prefix}{request}-{choice}"


def part_id(prefix: str, request: str, choice: int, place: int) -> str:
    """Id of something within a completion: its tool call number `place`, say.

    >>> part_id("call_", "0123456789abcdef01234567", 0, 2)
    'call_0123456789abcdef012345670002'
    """
    return f"{prefix}{request}{choice:02x}{place & 0xFF:02x}"


def origin(minted: str) -> Origin | None:
    """Which completion an id comes from; None if it was not minted here.

    >>> origin("call_0123456789abcdef012345670102") == origin(
    ...     "chatcmpl-0123456789abcdef01234567-1")
    True
    >>> origin("call_of_somebody_else") is None
    True
    """
    match = _MINTED.fullmatch(minted)
    if match is None:
        return None
    request, number, choice = match.groups()
    return Origin(request, int(number) if number else int(choice or "0", 16))
