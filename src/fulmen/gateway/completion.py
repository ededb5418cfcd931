"""One completion on its way from the engine to the client: tokens, text, and when to stop."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fulmen.engine.base import Delta
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
    a piece that may be the beginning of a stop string; and everything from a structural token on
    (a tool call), which only the whole completion can be read from. Reasoning between `<think>` and
    `</think>` is a stream of its own.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        stops: Sequence[str],
        *,
        reasoning: bool = False,
        raw: bool = False,
    ) -> None:
        """`reasoning`: the prompt has opened the reasoning already; `raw`: all is text as it is."""
        self._renderer = renderer
        self._stops = tuple(stops)
        self._raw = raw
        self._reasoning = reasoning and not raw
        self._closed = False
        self._begun = False
        """Whether anything but white space was said."""
        self._leading = not raw
        """Whether white space would stand at a beginning, where it is no part of the text."""
        self._window: list[int] = []
        self._read = 0
        """Characters of the decoded window that are in `_held` or given out."""
        self._held = ""
        """Text that is not certain yet."""
        self.stopped_at: str | None = None

    def push(self, ids: Sequence[int]) -> list[tuple[str, str]]:
        """Take new tokens; returns (field, text) pieces for `content` or `reasoning_content`."""
        pieces: list[tuple[str, str]] = []
        for token in ids:
            if self._closed or self.stopped_at is not None:
                break
            marker = None if self._raw else self._renderer.markers.get(token)
            if marker is None:
                self._take(token)
                pieces += self._flush()
            else:
                self._enter(marker)
        return pieces

    def _enter(self, marker: str) -> None:
        """Reasoning stands at the very beginning and once; any other structure ends the text."""
        if marker == "<think>" and not (self._reasoning or self._begun):
            self._reasoning = True
        elif marker == "</think>" and self._reasoning:
            self._reasoning = False
        else:
            self._closed = True
        self._window, self._read, self._held, self._begun = [], 0, "", True
        self._leading = True

    def _take(self, token: int) -> None:
        """Decode a token behind the one before it, once its characters are complete.

        Only the last token is kept as context: decoding all of them each time would cost a long
        answer the square of its length.
        """
        self._window.append(token)
        text = self._renderer.decode(self._window)
        if text.endswith(_REPLACEMENT):
            self._begun = True
            return
        self._held += text[self._read :]
        self._window = self._window[-1:]
        self._read = len(self._renderer.decode(self._window))
        if self._leading:
            self._held = self._held.lstrip()
            self._leading = not self._held
        self._begun = self._begun or bool(self._held)

    def _flush(self) -> list[tuple[str, str]]:
        certain = self._certain(self._held)
        fresh, self._held = self._held[:certain], self._held[certain:]
        name = "reasoning_content" if self._reasoning else "content"
        return [(name, fresh)] if fresh else []

    def _certain(self, text: str) -> int:
        """How many leading characters can be given out."""
        stops = () if self._reasoning else self._stops
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            place, self.stopped_at = min(found)
            return len(text[:place] if self._raw else text[:place].rstrip())
        end = len(text if self._raw else text.rstrip())
        for stop in stops:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    before = text[: len(text) - size]
                    end = min(end, len(before if self._raw else before.rstrip()))
                    break
        return end
