"""What an agent prints, kept apart for each attempt in a process that runs many."""

import contextvars
import io
import sys
from typing import TextIO

MOST_CHARACTERS = 64 * 1024
"""Of a log the last so many are kept."""


def sendable(text: str) -> str:
    """The text with a `?` for each half of a surrogate pair, which no encoding can write.

    >>> sendable("half \\ud83d")
    'half ?'
    """
    return text.encode(errors="replace").decode()


class Log:
    """The bounded log of one attempt."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0

    def write(self, text: str) -> None:
        """Add text; the oldest gives way."""
        self._parts.append(text)
        self._size += len(text)
        if self._size > 2 * MOST_CHARACTERS:
            self._parts = [self.text]
            self._size = len(self._parts[0])

    @property
    def text(self) -> str:
        """The last part."""
        return sendable("".join(self._parts)[-MOST_CHARACTERS:])


current_log: contextvars.ContextVar[Log | None] = contextvars.ContextVar("fulmen_log", default=None)


class _ByContext(io.TextIOBase):
    """Writes to the current attempt's log; outside of attempts, to the stream it stands for."""

    def __init__(self, original: TextIO) -> None:
        self._original = original

    def write(self, text: str) -> int:
        log = current_log.get()
        if log is None:
            return self._original.write(text)
        log.write(text)
        return len(text)

    def flush(self) -> None:
        self._original.flush()

    def fileno(self) -> int:
        return self._original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override] - a property where io has an attribute
        return self._original.encoding

    def writable(self) -> bool:
        return True


def install() -> None:
    """Replace sys.stdout and sys.stderr by streams that know whose output they get."""
    sys.stdout, sys.stderr = _ByContext(sys.stdout), _ByContext(sys.stderr)
