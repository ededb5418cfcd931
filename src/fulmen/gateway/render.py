"""Messages to tokens and back: what the gateway asks of a model's message format.

Who fulfils it is decided in `fulmen.gateway.formats`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fulmen.schema.records import JSON

Message = dict[str, JSON]
"""In the form of OpenAI's chat completions."""
Tools = Sequence[dict[str, JSON]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion read as a message."""

    content: str
    """Without white space at its ends."""
    reasoning: str = ""
    """Likewise."""
    tool_calls: tuple[ToolCall, ...] = ()


class ChatRenderer(Protocol):
    """Owns the conversion between messages and token ids of one model."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an assistant turn."""
        ...

    @property
    def markers(self) -> Mapping[int, str]:
        """Tokens that are structure, not text, with their spelling."""
        ...

    @property
    def bare_calls(self) -> bool:
        """Whether tool calls are written as plain text, so that text may turn out to be one."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Tools, options: Mapping[str, JSON]
    ) -> tuple[int, ...]:
        """The prompt that asks for the next assistant turn.

        Raises:
            ValueError: the format refuses the messages or the options.
        """
        ...

    def extend(
        self,
        served: tuple[tuple[int, ...], tuple[int, ...]],
        messages: Sequence[Message],
        known: int,
        tools: Tools,
        options: Mapping[str, JSON],
    ) -> tuple[int, ...] | None:
        """The same prompt, made by going on from the served (prompt, completion).

        The first `known` messages are those of the served prompt and its answer; the rest holds no
        assistant turn. None if the format does not allow it.
        """
        ...

    def parse(self, prompt: Sequence[int], completion: Sequence[int], tools: Tools) -> Answer:
        """Read a completion. Tool calls that are malformed, or that nobody offered, stay text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special tokens are left out."""
        ...


def text_of(content: JSON) -> str:
    """The text of a message's content: a string, a list of text parts, or nothing.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    'ab'
    """
    if isinstance(content, list):
        return "".join(part.get("text") or part.get("refusal") or "" for part in content)
    return content or ""
