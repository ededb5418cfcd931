"""What is peculiar to one model family's format, beside what `renderers` knows of it.

A family says which of its tokens are structure, how the text of a completion is told from its
reasoning and its calls while it is still being sampled, and what a completion must be rid of before
it can be parsed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fulmen.gateway import dialects
from fulmen.gateway.form import Dialect
from fulmen.schema.records import JSON

Field = Literal["content", "reasoning_content"]
"""Where text belongs in an answer."""

_THINK, _END_THINK = "<think>", "</think>"
_LOOK_BACK = 16
"""Tokens at a prompt's end that are searched for reasoning that was opened as text."""


class Tokens(Protocol):
    """A tokenizer as a family sees it."""

    @property
    def markers(self) -> Mapping[int, str]:
        """Tokens that are structure, not text, with their spelling."""
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """The text of tokens, structure spelled out."""
        ...


class Reading(Protocol):
    """Follows one completion, token by token."""

    @property
    def field(self) -> Field | None:
        """Where text belongs now; None: nowhere, as in a header or a call."""
        ...

    @property
    def closed(self) -> bool:
        """The rest can only be read from the whole completion."""
        ...

    @property
    def openings(self) -> tuple[str, ...]:
        """Text that begins with one of these may be no text: it waits for the whole completion."""
        ...

    def take(self, token: int, *, begun: bool) -> bool:
        """Whether a token is text of `field`; `begun`: there was text before that is not blank."""
        ...


class Family:
    """Reasoning and calls stand between tokens of their own: Qwen's way, and most templates'."""

    structure: frozenset[str] = frozenset({_THINK, _END_THINK, "<tool_call>"})
    """Tokens that are structure although tokenizers do not call them special."""
    dialect: Dialect = dialects.QWEN
    """How answers are written, for those that are given a form."""
    hint = ""
    """What may help a user whose model's format cannot be set up."""

    def reading(self, tokens: Tokens, prompt: Sequence[int], tools: bool) -> Reading:  # noqa: ARG002
        """How to follow a completion of this prompt; `tools`: calls are wanted."""
        if _THINK in tokens.markers.values():
            opened = _last_marker(tokens, prompt) == _THINK
            return _Tagged(tokens, "reasoning_content" if opened else "content")
        # Reasoning whose ends are mere text is rare, and read from the whole completion only.
        opened = tokens.spell(prompt[-_LOOK_BACK:]).rstrip().endswith(_THINK)
        return _Tagged(tokens, "content", openings=(_THINK,), closed=opened)

    def options(self, tokens: Tokens, prompt: Sequence[int]) -> Mapping[str, JSON]:  # noqa: ARG002
        """The template options that a prompt was made with, as far as parsing depends on them."""
        return {}

    def body(self, tokens: Tokens, completion: Sequence[int]) -> Sequence[int]:  # noqa: ARG002
        """The part of a completion to parse. Raises ValueError if it can only be text."""
        return completion


class Plain(Family):
    """A template of which it is not known how calls are written."""

    dialect = dialects.PLAIN


class Glm(Family):
    """An answer is reasoning until `</think>`, unless the prompt has closed that already."""

    dialect = dialects.GLM

    def reading(self, tokens: Tokens, prompt: Sequence[int], tools: bool) -> Reading:  # noqa: ARG002
        closed = _last_marker(tokens, prompt) == _END_THINK
        return _Tagged(tokens, "content" if closed else "reasoning_content", thought=closed)

    def options(self, tokens: Tokens, prompt: Sequence[int]) -> Mapping[str, JSON]:
        return {"enable_thinking": False} if _last_marker(tokens, prompt) == _END_THINK else {}


class DeepSeek(Family):
    """Its tokenizers call no token special but those at the ends of a text."""

    dialect = dialects.DEEPSEEK

    structure = Family.structure | {
        f"<｜{name}｜>"
        for name in (
            "User",
            "Assistant",
            "tool▁calls▁begin",
            "tool▁calls▁end",
            "tool▁call▁begin",
            "tool▁call▁end",
            "tool▁sep",
            "tool▁outputs▁begin",
            "tool▁outputs▁end",
            "tool▁output▁begin",
            "tool▁output▁end",
        )
    }


class Llama(Family):
    """A call is bare JSON, which only its end tells from text that begins with a brace."""

    dialect = dialects.LLAMA3

    def reading(self, tokens: Tokens, prompt: Sequence[int], tools: bool) -> Reading:  # noqa: ARG002
        return _Tagged(tokens, "content", openings=("{",) if tools else ())

    def body(self, tokens: Tokens, completion: Sequence[int]) -> Sequence[int]:
        if any(tokens.markers.get(token) == "<|end_header_id|>" for token in completion):
            # The parser takes the last header for the prompt's, and drops what was said before.
            raise ValueError("a header within an answer")
        # Some models announce a call by this token, of which the parser knows nothing.
        tagged = completion and tokens.markers.get(completion[0]) == "<|python_tag|>"
        return completion[1:] if tagged else completion


class Harmony(Family):
    """Gpt-oss: an answer is messages of its own, each with a header that names its channel."""

    dialect = dialects.HARMONY

    hint = (
        "its vocabulary is downloaded by openai_harmony, or found in the folder that the "
        "environment variable TIKTOKEN_ENCODINGS_BASE names"
    )

    def reading(self, tokens: Tokens, prompt: Sequence[int], tools: bool) -> Reading:  # noqa: ARG002
        return _Channels(tokens, prompt)


@dataclass(slots=True)
class _Tagged:
    """Reasoning stands at the very beginning and once; any other structure ends the text."""

    tokens: Tokens
    field: Field
    openings: tuple[str, ...] = ()
    closed: bool = False
    thought: bool = False
    """The reasoning is over."""

    def take(self, token: int, *, begun: bool) -> bool:
        marker = self.tokens.markers.get(token)
        if marker is None:
            return True
        if marker == _THINK and not begun and not self.thought:
            self.field = "reasoning_content"
        elif marker == _END_THINK and self.field == "reasoning_content":
            self.field, self.thought = "content", True
        else:
            self.closed = True
        return False


class _Channels:
    """Text is what follows `<|message|>`, as its header says; a call has a recipient."""

    openings = ()

    def __init__(self, tokens: Tokens, prompt: Sequence[int]) -> None:
        self.field: Field | None = None
        self.closed = False
        self._tokens = tokens
        self._header: list[int] | None = None
        """What was read of a header, while in one."""
        start = len(prompt)
        while start and tokens.markers.get(prompt[start - 1]) != "<|start|>":
            start -= 1
        for token in prompt[max(start - 1, 0) :]:
            self.take(token, begun=False)

    def take(self, token: int, *, begun: bool) -> bool:  # noqa: ARG002
        marker = self._tokens.markers.get(token)
        if marker == "<|return|>":
            self.closed = True
        elif self._header is not None:
            self._read_header(token, marker)
        elif marker is None:
            return self.field is not None
        elif marker == "<|start|>":
            self.field, self._header = None, []
        elif marker in ("<|end|>", "<|call|>"):
            self.field = None
        elif self.field is not None:
            self.closed = True  # structure where none belongs: the parser spells it out
        return False

    def _read_header(self, token: int, marker: str | None) -> None:
        assert self._header is not None
        if marker != "<|message|>":
            self._header.append(token)
            return
        header = self._tokens.spell(self._header)
        self._header = None
        words = header.partition("<|channel|>")[2].split()
        channel = words[0] if words else None
        if re.search(r"to=functions\.", header):
            self.field = None
        elif channel == "analysis":
            self.field = "reasoning_content"
        else:
            self.field = "content" if channel in ("final", "commentary") else None


def _last_marker(tokens: Tokens, prompt: Sequence[int]) -> str | None:
    markers = tokens.markers
    return next((markers[token] for token in reversed(prompt) if token in markers), None)


@dataclass(frozen=True, slots=True)
class Known:
    """A family that `renderers` renders and parses by heart."""

    config: str
    """Name of its configuration there."""
    token: str
    """A token that the family's tokenizers have: architecture alone does not decide the format
    (many fine-tunes of llama speak another)."""
    family: Family


FAMILIES: Mapping[str, Known] = {
    "qwen3": Known("Qwen3RendererConfig", "<|im_start|>", Family()),
    "qwen3_moe": Known("Qwen3RendererConfig", "<|im_start|>", Family()),
    "llama": Known("Llama3RendererConfig", "<|start_header_id|>", Llama()),
    "gpt_oss": Known("GptOssRendererConfig", "<|channel|>", Harmony()),
    "glm4_moe": Known("GLM45RendererConfig", "<|assistant|>", Glm()),
    "deepseek_v3": Known("DeepSeekV3RendererConfig", "<｜Assistant｜>", DeepSeek()),
}
"""By the `model_type` of a model."""
