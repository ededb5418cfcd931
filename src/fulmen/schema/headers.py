"""Headers by which a request says who asks, beside the key that says which attempt it is.

Workers put them on requests, the gateway reads them; both are optional.
"""

import re
from urllib.parse import quote, unquote

AGENT = "x-fulmen-agent"
"""Name of the agent that asks, as `encode_agent` writes it."""
TRACEPARENT = "traceparent"
"""The span that is open where the request is made. Source: W3C Trace Context, 3.2."""

_MOST_CHARACTERS = 128
"""Of an agent's name."""
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


def encode_agent(name: str) -> str:
    """A name as a header can carry it: ASCII as it is, anything else and `%` percent-encoded.

    >>> encode_agent("SQL writer"), encode_agent("prüfer")
    ('SQL writer', 'pr%C3%BCfer')
    """
    return quote(name.strip(), safe=_PLAIN)


def read_agent(header: str | None) -> str:
    """The name that a header carries; empty if it is none: too long, or not printable.

    >>> read_agent("pr%C3%BCfer"), read_agent("a%0Ab"), read_agent(None)
    ('prüfer', '', '')
    """
    name = unquote(header or "").strip()
    usable = len(name) <= _MOST_CHARACTERS and name.isprintable() and "\ufffd" not in name
    return name if usable else ""


def read_span(header: str | None) -> str | None:
    """The parent id of a `traceparent`, 16 hexadecimal digits; None if there is none.

    >>> read_span("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    '00f067aa0ba902b7'
    >>> read_span("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01") is None
    True
    """
    match = _TRACEPARENT.fullmatch(header or "")
    if match is None:
        return None
    version, trace, parent, more = match.groups()
    # Later versions may go on behind the flags; this one may not, and ff is none.
    if version == "ff" or (version == "00" and more):
        return None
    return parent if int(trace, 16) and int(parent, 16) else None
