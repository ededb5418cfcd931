"""One completion on its way from the engine to the client: tokens, text, and when to stop."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fulmen.engine.base import Delta
from fulmen.gateway.families import Field, Reading
from fulmen.gateway.render import ChatRenderer
from fulmen.schema.records import VersionSpan

_REPLACEMENT = "\ufffd"


@dataclass(slots=True)
class Completion:
    """Everything sampled for one choice so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = "abort"
    """Until the engine or a stop string says otherwise: an unfinished completion was cut off."""
    stopped_at: str | None = None
    """The stop string that ended it."""

    def add(self, delta: Delta) -> None:
        """Take what the engine sampled."""
        if delta.token_ids and (not self.versions or self.versions[-1].version != delta.version):
            self.versions.append(VersionSpan(start=len(self.ids), version=delta.version))
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.top += delta.top
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason


class TextStream:
    """Turns tokens into text as they come, holding back what is not certain yet.

    Held back: half of a multi-byte character; white space at an end that may be the answer's end;
    a piece that may be the beginning of a stop string; and what may be a call, which only the whole
    completion can be read from. Where text belongs is the family's knowledge, in its `Reading`.
    """

    def __init__(
        self, renderer: ChatRenderer, stops: Sequence[str], reading: Reading | None
    ) -> None:
        """`reading` follows the completion; without one all is content, as it is."""
        self._reading = reading
        self._openings = reading.openings if reading else ()
        self._begun = False
        """Whether anything but white space was said."""
        raw = reading is None
        self._texts: dict[Field, _Text] = {
            "content": _Text(renderer, tuple(stops), raw=raw),
            "reasoning_content": _Text(renderer, (), raw=raw),
        }

    @property
    def stopped_at(self) -> str | None:
        """The stop string that was found."""
        return self._texts["content"].stopped_at

    def push(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Take new tokens; returns (field, text) pieces for `content` or `reasoning_content`."""
        pieces: list[tuple[str, str]] = []
        for token in ids:
            if self.stopped_at is not None:
                break
            field = self._field_of(token)
            if field is None:
                continue
            text = self._texts[field]
            self._begun = text.take(token) or self._begun
            fresh = "" if self._waits(text.held) else text.flush()
            if fresh:
                pieces.append((field, fresh))
        return pieces

    def _field_of(self, token: int) -> Field | None:
        """Where a token's text belongs, if it has any that can be told already."""
        reading = self._reading
        if reading is None:
            return "content"
        if reading.closed:
            return None
        before = reading.field
        if reading.take(token, begun=self._begun):
            return reading.field
        if before is not None:
            self._texts[before].interrupt()
        return None

    def _waits(self, text: str) -> bool:
        """Whether the answer's first text begins as a call does, or may yet turn out to."""
        if text and not any(o.startswith(text) or text.startswith(o) for o in self._openings):
            self._openings = ()
        return bool(self._openings)


class _Text:
    """The text of one field, decoded token by token."""

    def __init__(self, renderer: ChatRenderer, stops: tuple[str, ...], *, raw: bool) -> None:
        self._renderer = renderer
        self._stops = stops
        self._raw = raw
        self._leading = not raw
        """Whether white space would stand at the beginning, where it is no part of the text."""
        self._window: list[int] = []
        self._read = 0
        """Characters of the decoded window that are in `held` or given out."""
        self.held = ""
        """Text that is not certain yet."""
        self.stopped_at: str | None = None

    def take(self, token: int) -> bool:
        """Decode a token behind the one before it, once its characters are complete.

        Only the last token is kept as context: decoding all of them each time would cost a long
        answer the square of its length. Returns whether there is text now that is not blank.
        """
        self._window.append(token)
        text = self._renderer.decode(self._window)
        if text.endswith(_REPLACEMENT):
            return True
        self._hold(text[self._read :])
        self._window = self._window[-1:]
        self._read = len(self._renderer.decode(self._window))
        return bool(self.held)

    def interrupt(self) -> None:
        """Structure comes between: a character that is incomplete now stays so."""
        self._hold(self._renderer.decode(self._window)[self._read :])
        self._window, self._read = [], 0

    def _hold(self, text: str) -> None:
        self.held += text
        if self._leading:
            self.held = self.held.lstrip()
            self._leading = not self.held

    def flush(self) -> str:
        """Give out what is certain."""
        certain = self._certain(self.held)
        fresh, self.held = self.held[:certain], self.held[certain:]
        return fresh

    def _certain(self, text: str) -> int:
        """How many leading characters can be given out."""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            place, self.stopped_at = min(found)
            return len(text[:place] if self._raw else text[:place].rstrip())
        end = len(text if self._raw else text.rstrip())
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    before = text[: len(text) - size]
                    end = min(end, len(before if self._raw else before.rstrip()))
                    break
        return end
