"""What the words of AIR's rules mean: one small function for each.

A detector reads an attempt and yields what it finds. To whom the reward goes, filters and caps are
the business of `fulmen.credit.air`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from fulmen.credit.bodies import (
    answer_text,
    asked_tools,
    canonical,
    error_text,
    offered_tools,
    read_json,
)
from fulmen.credit.observe import Observed
from fulmen.credit.rules import Rule, When
from fulmen.credit.schemas import fits
from fulmen.schema.errors import GraderError
from fulmen.schema.records import Call, ToolOutcome, ToolUse

Predicate = Callable[[Call, Sequence[ToolUse]], Any]
"""A user's function of a call and the uses of tools that it asked for."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Something that a rule looks for."""

    agent: str
    call_id: str | None
    """None: no call asked for the tool."""
    tool: str | None = None
    strength: float = 1.0
    """Times the rule's weight."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a detector works with."""

    rule: Rule
    observed: Observed
    predicate: Predicate | None = None
    calls: Mapping[str, Call] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", {call.id: call for call in self.observed.calls})

    def answered(self) -> Iterator[Call]:
        """Calls whose answer the agent received."""
        return (c for c in self.observed.calls if c.status < 400 and not c.superseded)


Detector = Callable[[Given], Iterator[Hit]]


def _outcome(outcome: ToolOutcome) -> Detector:
    def detect(given: Given) -> Iterator[Hit]:
        return (_use(use) for use in given.observed.tools if use.outcome == outcome)

    return detect


def _json(*, valid: bool) -> Detector:
    def detect(given: Given) -> Iterator[Hit]:
        if given.rule.of == "answer":
            for call in given.answered():
                # An answer that only calls tools has no text that could be JSON.
                text = answer_text(call.response)
                wordless = not text and asked_tools(call.response)
                if not wordless and _is_json(text) == valid:
                    yield _call(call)
            return
        for use in _asked_for(given):
            if _is_json(use.arguments or "{}") == valid:
                yield _use(use)

    return detect


def _schema_invalid(given: Given) -> Iterator[Hit]:
    """Arguments that are JSON and no fit for the tool's schema in the request."""
    for use in _asked_for(given):
        offered = offered_tools(given.calls[use.call_id or ""].request)
        read = read_json(use.arguments or "{}")
        if use.name in offered and read and not fits(read[0], offered[use.name]):
            yield _use(use)


def _repeated_call(given: Given) -> Iterator[Hit]:
    """The same tool with the same arguments again, by the same agent."""
    seen: set[tuple[str, str, str]] = set()
    for use in given.observed.tools:
        what = (use.agent, use.name, canonical(use.arguments))
        if what in seen:
            yield _use(use)
        seen.add(what)


def _empty_result(given: Given) -> Iterator[Hit]:
    for use in given.observed.tools:
        if use.result is not None and use.result.strip() in ("", "[]", "{}", "null", "None", '""'):
            yield _use(use)


def _truncated(given: Given) -> Iterator[Hit]:
    return (_call(call) for call in given.answered() if call.finish_reason == "length")


def _context_overflow(given: Given) -> Iterator[Hit]:
    """Refused because it was too long, in OpenAI's or Anthropic's words."""
    words = ("context_length_exceeded", "prompt is too long", "maximum context length")
    for call in given.observed.calls:
        if call.status >= 400 and any(word in error_text(call.response) for word in words):
            yield _call(call)


def _slow(given: Given) -> Iterator[Hit]:
    limit = given.rule.seconds or math.inf
    if given.rule.tool is None:
        yield from (_call(c) for c in given.answered() if c.ended - c.started > limit)
        return
    for use in given.observed.tools:
        if use.started is not None and use.ended is not None and use.ended - use.started > limit:
            yield _use(use)


def _http_status(given: Given) -> Iterator[Hit]:
    rule = given.rule
    for call in given.observed.calls:
        if call.status == rule.status or call.status >= (rule.min_status or math.inf):
            yield _call(call)


def _predicate(given: Given) -> Iterator[Hit]:
    function = given.predicate
    if function is None:
        raise GraderError(f"rule {given.rule.reward_name!r}: its function was not loaded")
    for call in given.answered():
        tools = [use for use in given.observed.tools if use.call_id == call.id]
        where = f"rule {given.rule.reward_name!r}: {given.rule.function}"
        try:
            said = function(call, tools)
        except Exception as error:
            reason = f"{type(error).__name__}({str(error)[:200]!r})"
            raise GraderError(f"{where} raised {reason} on call {call.id}") from error
        if not isinstance(said, Real) or not math.isfinite(said):
            raise GraderError(
                f"{where} returned {said!r:.80} on call {call.id}",
                hint="return True, False or a finite number",
            )
        if said:
            yield Hit(call.agent, call.id, strength=float(said))


DETECTORS: Mapping[When, Detector] = {
    "tool_ok": _outcome("ok"),
    "tool_failed": _outcome("error"),
    "tool_timeout": _outcome("timeout"),
    "json_valid": _json(valid=True),
    "json_invalid": _json(valid=False),
    "schema_invalid": _schema_invalid,
    "repeated_call": _repeated_call,
    "empty_result": _empty_result,
    "truncated": _truncated,
    "context_overflow": _context_overflow,
    "slow": _slow,
    "http_status": _http_status,
    "predicate": _predicate,
}


def _asked_for(given: Given) -> Iterator[ToolUse]:
    """Uses whose arguments a model wrote."""
    return (use for use in given.observed.tools if use.call_id in given.calls)


def _use(use: ToolUse) -> Hit:
    return Hit(use.agent, use.call_id, use.name)


def _call(call: Call) -> Hit:
    return Hit(call.agent, call.id)


def _is_json(text: str) -> bool:
    return read_json(text) is not None
