"""The form an answer must have, as a grammar that the engine samples under.

Every model family writes calls and reasoning in its own way; a `Dialect` is that way as data, and
`AnswerForm` makes grammars of it (Lark, in llguidance's dialect, where `<[7]>` is token 7).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fulmen.gateway.errors import RequestRefused
from fulmen.schema.records import JSON

Tool = Mapping[str, JSON]
Schema = Mapping[str, JSON]
_ANY_OBJECT: Schema = {"type": "object"}
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Without it a weak model can write white space for ever; these are the separators that most
formats render, so that a history rendered anew gives the tokens it was."""


@dataclass(frozen=True, slots=True)
class JsonOutput:
    """The answer must be JSON."""

    schema: Schema
    """JSON schema that it must fulfil."""


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """The answer must be a tool call."""

    names: tuple[str, ...]
    """Of one of these tools."""


Spell = Callable[[str], str]
"""Text to an expression, with the tokens of the model at hand."""


def json_value(schema: Schema) -> str:
    """A JSON value as an expression."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def json_arguments(rule: str, schema: Schema, _spell: Spell) -> list[str]:
    """Arguments as one JSON value."""
    return [f"{rule}: {json_value(schema)}"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a family spells its answers; structural tokens stand as their text."""

    call: tuple[str, str, str] | None = None
    """What stands before a call's name, between name and arguments, and behind them."""
    between: str | None = None
    """What separates two calls; None: an answer has one at most."""
    around: tuple[str, str] = ("", "")
    """What stands around all calls."""
    text: str = ""
    """What stands before text."""
    reasoning: tuple[str, str] | None = None
    """What stands before and behind reasoning."""
    mixed: bool = True
    """Whether calls may follow text."""
    bare: bool = False
    """Calls are JSON with nothing around it, from which a JSON answer cannot be told."""
    thinks: bool = False
    """Whether reasoning must come first: without it the answer would be read as reasoning."""
    call_opening: str = ""
    """Pattern that free text must not match: it would be read as a call."""
    arguments: Callable[[str, Schema, Spell], list[str]] = json_arguments
    """The rule of this name for arguments of this schema, and those that it needs. Raises
    GrammarError if the format cannot be held to the schema."""


class AnswerForm:
    """Makes grammars for the answers of one model."""

    def __init__(self, dialect: Dialect, tokens: Mapping[str, int]) -> None:
        """`tokens` are the tokenizer's added ones, by spelling."""
        self._dialect = dialect
        self._tokens = tokens
        longest_first = sorted(tokens, key=len, reverse=True)
        self._structure = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def grammar(
        self,
        output: JsonOutput | ForcedCall | None,
        tools: Sequence[Tool],
        prompt: Sequence[int],
        *,
        parallel: bool = True,
        withheld: bool = False,
    ) -> str:
        """The grammar of an answer that goes on from `prompt`; empty if it may be anything.

        Args:
            output: what is asked for.
            tools: those that may be called.
            prompt: its end decides whether the model is reasoning.
            parallel: whether several may be called.
            withheld: the prompt names tools that may not be called.

        Raises:
            RequestRefused: this model has no form for what is asked.
            GrammarError: a schema cannot be kept to in this model's format.
        """
        single = bool(tools) and not parallel and self._dialect.between is not None
        strict = any(_function(tool).get("strict") for tool in tools)
        held = strict or single or (withheld and self._dialect.call is not None)
        if output is None and not held:
            return ""
        if isinstance(output, JsonOutput) and tools and self._dialect.bare:
            raise RequestRefused(
                "this model's format cannot tell a JSON answer from a call: give tools or a form, "
                "not both",
                param="tools",
            )
        answers = list(self._answers(output, tools))
        rules = [f"start: {self._reasoning(prompt)} ({' | '.join(answers)})"]
        if "calls" in " ".join(answers):
            rules += self._calls(output, tools, parallel=parallel)
        if isinstance(output, JsonOutput):
            rules.append(f"json: {json_value(output.schema)}")
        pattern = self._dialect.call_opening
        rules += [
            f"FREE: /(?s:.*)/ & ~/{pattern}/" if pattern else "FREE: /(?s:.*)/",
            f"REASONS: /(?s:.*)/ & ~/(?s:.*){_escaped(self._closing)}(?s:.*)/",
        ]
        return "\n".join(rule for rule in rules if _used(rule, rules))

    def _answers(
        self, output: JsonOutput | ForcedCall | None, tools: Sequence[Tool]
    ) -> Iterator[str]:
        """What may be said after reasoning, each an expression."""
        text = self._spelled(self._dialect.text)
        callable_tools = bool(tools) and self._dialect.call is not None
        if isinstance(output, JsonOutput):
            yield f"{text} json"
        if output is None:
            yield f"{text} FREE"
            if callable_tools and self._dialect.mixed:
                yield f"{text} FREE calls"
        if callable_tools:
            yield "calls"
        elif isinstance(output, ForcedCall):
            raise RequestRefused(
                "this model's format has no tool calls that could be asked for",
                param="tool_choice",
            )

    def _calls(
        self, output: JsonOutput | ForcedCall | None, tools: Sequence[Tool], *, parallel: bool
    ) -> Iterator[str]:
        """The rules for `calls`."""
        dialect = self._dialect
        assert dialect.call is not None
        allowed = [
            function
            for function in map(_function, tools)
            if not isinstance(output, ForcedCall) or function["name"] in output.names
        ]
        opening, closing = map(self._spelled, dialect.around)
        more = ""
        if parallel and dialect.between is not None:
            more = f"({self._spelled(dialect.between)} call)*"
        yield f"calls: {opening} call {more} {closing}"
        yield "call: " + " | ".join(f"call_{place}" for place in range(len(allowed)))
        before, middle, behind = map(self._spelled, dialect.call)
        for place, function in enumerate(allowed):
            name = _quoted(function["name"])
            strict = function.get("strict")
            schema = (function.get("parameters") or _ANY_OBJECT) if strict else _ANY_OBJECT
            yield f"call_{place}: {before} {name} {middle} args_{place} {behind}"
            yield from dialect.arguments(f"args_{place}", schema, self._spelled)

    @property
    def _closing(self) -> str:
        """The token that ends reasoning."""
        reasoning = self._dialect.reasoning
        found = self._structure.search(reasoning[1]) if reasoning else None
        return found.group() if found else "\0"

    def _reasoning(self, prompt: Sequence[int]) -> str:
        """What may or must come before the answer: it depends on how the prompt ends."""
        if self._dialect.reasoning is None or self._closing == "\0":
            return ""
        opening, closing = self._dialect.reasoning
        opens = [self._tokens[token] for token in self._structure.findall(opening)]
        closes = [self._tokens[token] for token in self._structure.findall(closing)]
        structure = set(self._tokens.values())
        last = next((token for token in reversed(prompt) if token in structure), None)
        if last in opens[-1:]:
            return f"REASONS {self._spelled(closing)}"
        if last in closes[:1]:
            return ""
        least = "" if self._dialect.thinks else "?"
        return f"({self._spelled(opening)} REASONS {self._spelled(closing)}){least}"

    def _spelled(self, text: str) -> str:
        """A text as an expression: structural tokens by number, the rest quoted."""
        parts, end = [], 0
        for found in self._structure.finditer(text):
            parts += [_quoted(text[end : found.start()]), f"<[{self._tokens[found.group()]}]>"]
            end = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[end:])]))


def _function(tool: Tool) -> Mapping[str, JSON]:
    return tool["function"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    """As a pattern between slashes."""
    return re.escape(text).replace("/", r"\/")


def _used(rule: str, rules: Sequence[str]) -> bool:
    """Whether a terminal is asked for; llguidance compiles unused ones, too."""
    name = rule.partition(":")[0]
    return not name.isupper() or any(name in other for other in rules if other is not rule)
