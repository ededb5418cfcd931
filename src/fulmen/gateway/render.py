"""Messages to tokens and back, for the model family at hand.

The work is done by the `renderers` package, which knows the formats of the common families. For
other models there is the tokenizer's chat template; its conversations are continued by a check of
its own output: if the longer conversation's text begins with the served text, only the rest is
encoded.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from fulmen.schema.errors import ModelError
from fulmen.schema.records import JSON

_log = logging.getLogger(__name__)

Message = dict[str, JSON]
Tools = Sequence[dict[str, JSON]] | None


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
    reasoning: str | None = None
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

    def render(
        self, messages: Sequence[Message], tools: Tools, options: Mapping[str, JSON]
    ) -> tuple[int, ...]:
        """The prompt that asks for the next assistant turn.

        Raises ValueError if the template refuses the messages or the options.
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
        """The same prompt, beginning with the served (prompt, completion) token for token.

        The first `known` messages are those of the served prompt and its answer. None if the
        format does not allow it.
        """
        ...

    def parse(self, prompt: Sequence[int], completion: Sequence[int], tools: Tools) -> Answer:
        """Read a completion; malformed tool calls stay text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; structure and end-of-turn tokens are left out."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw text, whose structural tokens are spelled out."""
        ...


_FAMILIES: Mapping[str, tuple[str, str]] = {
    "qwen3": ("Qwen3RendererConfig", "<|im_start|>"),
    "qwen3_moe": ("Qwen3RendererConfig", "<|im_start|>"),
    "llama": ("Llama3RendererConfig", "<|start_header_id|>"),
    "gpt_oss": ("GptOssRendererConfig", "<|channel|>"),
    "glm4_moe": ("GLM45RendererConfig", "<|assistant|>"),
    "deepseek_v3": ("DeepSeekV3RendererConfig", "<｜Assistant｜>"),
}
"""model_type to the configuration in `renderers`, and a token that the family's tokenizers have:
architecture alone does not decide the format (many fine-tunes of llama speak another)."""

_TOOL_CALL_MARKER = "<tool_call>"
_REASONING = ("<think>", "</think>")


def make_renderer(tokenizer: Any, model_type: str) -> "ChatRenderer":  # noqa: ANN401
    """The renderer for a tokenizer (of transformers) and the `model_type` of its model.

    Raises:
        ModelError: neither the family is known nor is there a chat template.
    """
    import renderers  # 1.4 s: it brings the openai package and all families

    vocabulary = tokenizer.get_vocab()
    known = _FAMILIES.get(model_type)
    if known is not None and known[1] in vocabulary:
        return _Family(tokenizer, getattr(renderers, known[0]))
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"models of type {model_type!r} are not known and have no chat template")
    parser = "qwen3" if {_TOOL_CALL_MARKER, "</tool_call>"} <= vocabulary.keys() else None
    return _Template(tokenizer, renderers.DefaultRendererConfig, {"tool_parser": parser})


class _Family:
    """A family that `renderers` knows by heart."""

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - transformers' tokenizers share no useful type
        config: Any,  # noqa: ANN401 - one of renderers' config classes
        fixed: Mapping[str, JSON] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._fixed = dict(fixed or {})
        self._by_options: dict[tuple[bytes, bool], Any] = {}
        added = tokenizer.added_tokens_decoder.items()
        self._reasoning = {i for i, token in added if token.content in _REASONING}
        self._plain = self._renderer({})
        self._stop_ids = frozenset(self._plain.get_stop_token_ids())
        self._markers = {
            token_id: token.content
            for token_id, token in added
            if token.special or token.content in (*_REASONING, _TOOL_CALL_MARKER)
        }

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def markers(self) -> Mapping[int, str]:
        return self._markers

    def render(
        self, messages: Sequence[Message], tools: Tools, options: Mapping[str, JSON]
    ) -> tuple[int, ...]:
        try:
            ids = self._renderer(options).render_ids(
                _plain(messages), tools=_listed(tools), add_generation_prompt=True
            )
        except Exception as error:  # renderers and templates raise whatever they like
            raise _refused(error) from error
        return tuple(ids)

    def extend(
        self,
        served: tuple[tuple[int, ...], tuple[int, ...]],
        messages: Sequence[Message],
        known: int,
        tools: Tools,
        options: Mapping[str, JSON],
    ) -> tuple[int, ...] | None:
        prompt, completion = served
        # Formats that drop earlier reasoning render a conversation anew at every turn, to see what
        # is left of it. Without any reasoning it is all left, and the new turns can be appended.
        marks = self._reasoning
        plain = bool(marks) and marks.isdisjoint(prompt) and marks.isdisjoint(completion)
        try:
            bridged = self._renderer(options, keep=plain).bridge_to_next_turn(
                list(prompt), list(completion), _plain(messages[known:]), tools=_listed(tools)
            )
        except Exception as error:
            raise _refused(error) from error
        if bridged is not None:
            return tuple(bridged.token_ids)
        return self._extend_by_text(prompt + completion, self.render(messages, tools, options))

    def _extend_by_text(
        self, served: tuple[int, ...], rendered: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """The served tokens and the rest of a new rendering, if its text begins with theirs.

        Formats that may drop earlier reasoning refuse to continue at a new question; where there
        was nothing to drop, the texts agree and the sampled tokens stay.
        """
        before = self._tokenizer.decode(list(served), skip_special_tokens=False)
        whole = self._tokenizer.decode(list(rendered), skip_special_tokens=False)
        if not whole.startswith(before):
            return self._extend_by_structure(served, rendered)
        return served + tuple(
            self._tokenizer.encode(whole[len(before) :], add_special_tokens=False)
        )

    def _extend_by_structure(
        self, served: tuple[int, ...], rendered: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """The served tokens and the turns after them, if a new rendering has the same structure.

        Then nothing was dropped from it, and the texts differ in their spelling only: white space
        around a call, say, or the order of its arguments.
        """
        if served[-1] not in self._stop_ids:
            return None
        ends = [place for place, token in enumerate(rendered) if token in self._stop_ids]
        turns = sum(token in self._stop_ids for token in served)
        if len(ends) < turns:
            return None
        end = ends[turns - 1] + 1
        if self._structure(rendered[:end]) != self._structure(served):
            return None
        return served + rendered[end:]

    def _structure(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._markers]

    def parse(self, prompt: Sequence[int], completion: Sequence[int], tools: Tools) -> Answer:
        try:
            parsed = self._plain.parse_response(
                list(completion), prompt_ids=list(prompt), tools=_listed(tools)
            )
        except Exception:
            # A policy may write anything (ten thousand brackets, say): what cannot be read is text.
            _log.warning("a completion cannot be parsed and stays text", exc_info=True)
            return Answer(self.decode(completion).strip())
        calls: list[ToolCall] = []
        texts = [parsed.content.strip()]
        for attempt in parsed.tool_calls:
            call = _call(attempt) if tools else None
            if call is None:  # the agent should see what the model wrote
                texts.append(self._spelling(attempt, completion))
            else:
                calls.append(call)
        return Answer(
            content="\n".join(filter(None, texts)).strip(),
            reasoning=(parsed.reasoning_content or "").strip() or None,
            tool_calls=tuple(calls),
        )

    def _spelling(self, attempt: Any, completion: Sequence[int]) -> str:  # noqa: ANN401
        """The text of a call that is none."""
        if attempt.token_span is None:
            return attempt.raw
        start, end = attempt.token_span
        ids = [i for i in completion[start:end] if i not in self._stop_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _renderer(self, options: Mapping[str, JSON], *, keep: bool = False) -> Any:  # noqa: ANN401
        """A renderers.Renderer; `keep`: one that takes reasoning for kept, where it can be told."""
        import renderers

        key = orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS), keep
        if key not in self._by_options:
            retention = {"thinking_retention": "all"} if keep else {}
            try:
                self._by_options[key] = renderers.create_renderer(
                    self._tokenizer,
                    self._config(**self._fixed, **retention),
                    chat_template_kwargs=dict(options) or None,
                )
            except ValueError:  # options that say otherwise
                if not retention:
                    raise
                self._by_options[key] = self._renderer(options)
        return self._by_options[key]


class _Template(_Family):
    """Any other model, by its tokenizer's chat template: continued by comparing texts alone."""

    def extend(
        self,
        served: tuple[tuple[int, ...], tuple[int, ...]],
        messages: Sequence[Message],
        known: int,  # noqa: ARG002 - the template sees the conversation as a whole
        tools: Tools,
        options: Mapping[str, JSON],
    ) -> tuple[int, ...] | None:
        return self._extend_by_text(served[0] + served[1], self.render(messages, tools, options))


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates expect them: absent instead of null, text instead of text parts."""
    plain = []
    for message in messages:
        clean = {key: value for key, value in message.items() if value is not None}
        clean["content"] = text_of(message.get("content"))
        # Most formats know neither name, and leave such a message out without a word.
        other = {"developer": "system", "function": "tool"}
        clean["role"] = other.get(clean["role"], clean["role"])
        plain.append(clean)
    return plain


def text_of(content: JSON) -> str:
    """The text of a message's content: a string, a list of text parts, or nothing.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    'ab'
    """
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _listed(tools: Tools) -> list[Any] | None:
    return list(tools) if tools else None


def _call(attempt: Any) -> ToolCall | None:  # noqa: ANN401 - renderers' ParsedToolCall
    """A call that an agent can be given."""
    if attempt.status != "ok" or not attempt.name or not isinstance(attempt.name, str):
        return None
    arguments = attempt.arguments
    if not isinstance(arguments, str):
        # Not orjson, which refuses lone surrogates; and with the spaces that most formats render,
        # so that a history that is rendered anew gives the tokens it was.
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(_encodable(attempt.name), _encodable(arguments))


def _encodable(text: str) -> str:
    """Text without lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def _refused(error: Exception) -> ValueError:
    """Any exception of a renderer, as the protocol promises it."""
    lines = str(error).strip().splitlines()
    return ValueError((lines[0] if lines else type(error).__name__)[:300])
