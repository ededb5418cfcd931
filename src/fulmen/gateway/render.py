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

from fulmen.gateway.families import FAMILIES, Family, Plain, Reading
from fulmen.gateway.form import AnswerForm
from fulmen.gateway.splice import splice
from fulmen.gateway.tokens import LeanTokenizer
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

    @property
    def form(self) -> AnswerForm:
        """Says how an answer of a given form is written."""
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

    def reading(self, prompt: Sequence[int], tools: Tools) -> Reading:
        """How to tell a completion's text from the rest while it is being sampled."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; structure and end-of-turn tokens are left out."""
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """The text of tokens, structure spelled out."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a raw text, whose structural tokens are spelled out."""
        ...


_MOST_OPTIONS = 256
"""Renderers kept for options that agents asked with; they may ask with any."""


def make_renderer(tokenizer: Any, model_type: str) -> "ChatRenderer":  # noqa: ANN401
    """The renderer for a tokenizer (of transformers) and the `model_type` of its model.

    Raises:
        ModelError: neither the family is known nor is there a chat template.
    """
    import renderers  # 1.4 s: it brings the openai package and all families

    vocabulary = tokenizer.get_vocab()
    known = FAMILIES.get(model_type)
    if known is not None and known.token in vocabulary:
        try:
            lean = (
                LeanTokenizer(tokenizer) if hasattr(tokenizer, "backend_tokenizer") else tokenizer
            )
            return _Renderer(lean, getattr(renderers, known.config), known.family)
        except Exception as error:  # a vocabulary that cannot be downloaded, or lacks a token
            reason = "; ".join(filter(None, (str(_refused(error)), known.family.hint)))
            raise ModelError(
                f"the format of {model_type} models cannot be set up: {reason}"
            ) from error
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(f"models of type {model_type!r} are not known and have no chat template")
    calls = {"<tool_call>", "</tool_call>"} <= vocabulary.keys()
    parser = {"tool_parser": "qwen3" if calls else None}
    family = Family() if calls else Plain()
    return _Template(tokenizer, renderers.DefaultRendererConfig, family, parser)


class _Renderer:
    """Of a family that `renderers` knows by heart."""

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - transformers' tokenizers share no useful type
        config: Any,  # noqa: ANN401 - one of renderers' config classes
        family: Family,
        fixed: Mapping[str, JSON] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._family = family
        self._fixed = dict(fixed or {})
        self._by_options: dict[tuple[bytes, bool], Any] = {}
        added = tokenizer.added_tokens_decoder.items()
        self._reasoning = {i for i, token in added if token.content in ("<think>", "</think>")}
        self._plain = self._renderer({})
        self._markers = {
            token_id: token.content
            for token_id, token in added
            if token.special or token.content in family.structure
        }
        self._stop_ids = frozenset(self._plain.get_stop_token_ids()) | self._turn_ends()
        spelled = {token.content: token_id for token_id, token in added}
        self._form = AnswerForm(family.dialect, spelled)

    def _turn_ends(self) -> frozenset[int]:
        """Stop tokens that the package does not know."""
        return frozenset()

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def form(self) -> AnswerForm:
        return self._form

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
                list(prompt), list(completion), _plain(messages)[known:], tools=_listed(tools)
            )
        except Exception as error:
            raise _refused(error) from error
        if bridged is not None:
            return tuple(bridged.token_ids)
        return splice(self, prompt + completion, self.render(messages, tools, options))

    def reading(self, prompt: Sequence[int], tools: Tools) -> Reading:
        return self._family.reading(self, prompt, bool(tools))

    def parse(self, prompt: Sequence[int], completion: Sequence[int], tools: Tools) -> Answer:
        try:
            completion = self._family.body(self, completion)
            parsed = self._renderer(self._family.options(self, prompt)).parse_response(
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
        return self.spell(ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def spell(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _renderer(self, options: Mapping[str, JSON], *, keep: bool = False) -> Any:  # noqa: ANN401
        """A renderers.Renderer; `keep`: one that takes reasoning for kept, where it can be told."""
        import renderers

        key = orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS), keep
        if key not in self._by_options:
            if len(self._by_options) >= _MOST_OPTIONS:
                self._by_options.clear()
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


class _Template(_Renderer):
    """Any other model, by its tokenizer's chat template: continued by comparing texts alone."""

    def extend(
        self,
        served: tuple[tuple[int, ...], tuple[int, ...]],
        messages: Sequence[Message],
        known: int,  # noqa: ARG002 - the template sees the conversation as a whole
        tools: Tools,
        options: Mapping[str, JSON],
    ) -> tuple[int, ...] | None:
        return splice(self, served[0] + served[1], self.render(messages, tools, options))

    def _turn_ends(self) -> frozenset[int]:
        """The token that the template puts behind an answer.

        Often it is not the tokenizer's end of text, which is all that the package stops at.
        """
        asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": "fulmen"}
        try:
            ids = self._plain.render_ids([asked, said], add_generation_prompt=False)
        except Exception:  # a template that wants more than this
            return frozenset()
        behind = self.encode(self.spell(ids).partition("fulmen")[2])
        return frozenset([token for token in behind if token in self._markers][:1])

    def parse(self, prompt: Sequence[int], completion: Sequence[int], tools: Tools) -> Answer:
        ended = completion and completion[-1] in self._stop_ids
        return super().parse(prompt, completion[:-1] if ended else completion, tools)


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates expect them: absent instead of null, text instead of text parts."""
    plain = []
    called: dict[JSON, JSON] = {}
    for message in messages:
        clean = {key: value for key, value in message.items() if value is not None}
        clean["content"] = text_of(message.get("content"))
        # Most formats know neither name, and leave such a message out without a word.
        other = {"developer": "system", "function": "tool"}
        clean["role"] = other.get(clean["role"], clean["role"])
        # Some formats name the function at its result, where clients give only the call's id.
        called |= {call.get("id"): call["function"].get("name") for call in _calls(clean)}
        if clean["role"] == "tool" and called.get(clean.get("tool_call_id")):
            clean.setdefault("name", called[clean["tool_call_id"]])
        plain.append(clean)
    return plain


def _calls(message: Message) -> list[dict[str, Any]]:
    """The calls of a message that are of the form they should have."""
    calls = message.get("tool_calls")
    return [
        call
        for call in (calls if isinstance(calls, list) else [])
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]


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
    arguments = attempt.arguments
    # Arguments without quotes (GLM) are strings where they are no JSON, whatever the tool says.
    read = attempt.status == "ok" or (attempt.status == "invalid_json" and type(arguments) is dict)
    if not read or not attempt.name or not isinstance(attempt.name, str):
        return None
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
