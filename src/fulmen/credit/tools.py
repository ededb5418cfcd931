"""Which tools were used, by whom, and how they ended.

A tool call of an answer is joined to its `execute_tool` span by id; where the span has none, by
tool, arguments and order under the same agent. What no span covers is read from the message that
tells the model of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fulmen.credit.bodies import (
    Asked,
    Told,
    asked_tools,
    canonical,
    repeated_tools,
    text_of,
    tool_results,
)
from fulmen.schema import semconv
from fulmen.schema.records import Call, Span, ToolOutcome, ToolUse

ERROR_TEXTS = (
    "Error:",
    "Error executing tool",
    "An error occurred while running the tool",
    "Tool execution failed",
)
"""How frameworks begin what they tell the model when a tool raised (LangGraph, Microsoft's Agent
Framework; CrewAI, smolagents; OpenAI Agents). Any other text says nothing of how a tool ended."""

_WORST_FIRST: tuple[ToolOutcome, ...] = ("timeout", "error", "ok")
OUTCOMES: tuple[ToolOutcome, ...] = (*_WORST_FIRST, "unknown")

_TIMEOUTS = ("timeout", "timedout", "deadlineexceeded")


@dataclass(slots=True)
class _Use:
    """One tool call of an answer, and what is found about it."""

    asked: Asked
    call: Call
    spans: list[Span] = field(default_factory=list)
    told: Told | None = None


def tool_uses(
    calls: Sequence[Call],
    spans: Sequence[Span],
    told_agents: Mapping[str, str],
    agent_of: Mapping[str, str],
) -> tuple[ToolUse, ...]:
    """Every use of a tool, in order.

    Args:
        calls: with their agents, in order of arrival.
        spans: of the attempt.
        told_agents: call id to the agent's name where it is more than a name made of its prompt.
        agent_of: span id to the agent's name.
    """
    uses = [_Use(asked, call) for call in calls for asked in asked_tools(call.response)]
    executions = sorted((span for span in spans if _is_tool(span)), key=lambda span: span.started)
    alone = _join_spans(uses, executions, told_agents, agent_of)
    _join_messages(uses, calls)
    seen = [(_when(use), _tool_use(use)) for use in uses if _was_received(use, uses)]
    seen += [(span.started, _of_span(span, agent_of)) for span in alone]
    return tuple(use for _, use in sorted(seen, key=lambda pair: pair[0]))


def span_outcome(span: Span) -> ToolOutcome:
    """How an `execute_tool` span ended. One that never ended is unknown, never a success.

    >>> span_outcome(Span(id="s", rollout_id="r", attempt=1, name="execute_tool add", ended=2.0,
    ...     attributes={"error.type": "asyncio.TimeoutError"}))
    'timeout'
    """
    said = span.attributes.get(semconv.TOOL_OUTCOME)
    for outcome in OUTCOMES:
        if said == outcome:
            return outcome
    kind = str(span.attributes.get(semconv.ERROR_TYPE) or "")
    if any(word in kind.lower().replace("_", "") for word in _TIMEOUTS):
        return "timeout"
    if kind or span.status == "error":
        return "error"
    return "ok" if span.ended is not None else "unknown"


def told_outcome(told: Told) -> ToolOutcome:
    """What a message says of how a tool ended: mostly nothing, since a failure is told as text.

    >>> told_outcome(Told("t1", "Error: no such table", None)), told_outcome(Told("t1", "4", None))
    ('error', 'unknown')
    """
    # Not everybody who speaks Anthropic's protocol sets its flag: LiteLLM never does.
    if told.failed or told.text.startswith(ERROR_TEXTS):
        return "error"
    return "unknown" if told.failed is None else "ok"


def _is_tool(span: Span) -> bool:
    return span.attributes.get(semconv.OPERATION) == semconv.EXECUTE_TOOL


def _join_spans(
    uses: Sequence[_Use],
    spans: Sequence[Span],
    told_agents: Mapping[str, str],
    agent_of: Mapping[str, str],
) -> list[Span]:
    """Give every span to the use that it is about; returns those of uses that no call asked for."""
    by_id = {use.asked.id: use for use in reversed(uses) if use.asked.id}
    open_spans: list[Span] = []
    for span in spans:
        known = by_id.get(str(span.attributes.get(semconv.TOOL_CALL_ID, "")))
        if known is None:
            open_spans.append(span)
        else:
            known.spans.append(span)

    def candidates(span: Span) -> Iterator[_Use]:
        name = span.attributes.get(semconv.TOOL_NAME)
        agent = agent_of.get(span.id, "")
        for use in uses:
            other = told_agents.get(use.call.id, "")
            if not use.spans and use.asked.name == name and (agent in ("", other) or not other):
                yield use

    unmatched: list[Span] = []
    for span in open_spans:
        given = span.attributes.get(semconv.TOOL_ARGUMENTS)
        same = (
            use
            for use in candidates(span)
            if given is None or canonical(given) == canonical(use.asked.arguments)
        )
        if use := next(same, None):
            use.spans.append(span)
        else:
            unmatched.append(span)
    alone: list[Span] = []
    for span in unmatched:
        # A framework may convert arguments before it uses them: fine where there is one candidate.
        if len(left := list(candidates(span))) == 1:
            left[0].spans.append(span)
        else:
            alone.append(span)
    return alone


def _join_messages(uses: Sequence[_Use], calls: Sequence[Call]) -> None:
    """Give every use what the model was told of it: the first later message with its id."""
    by_id = {use.asked.id: use for use in reversed(uses) if use.asked.id}
    shown = {call.id: {told.id for told in tool_results(call.request)} for call in calls}
    for call in calls:
        renamed = {asked.id: asked for asked in repeated_tools(call.request)}
        for told in tool_results(call.request):
            use = by_id.get(told.id) or _renamed(uses, renamed.get(told.id), shown)
            if use is not None and use.told is None and use.call.index < call.index:
                use.told = told
                by_id[told.id] = use


def _renamed(
    uses: Sequence[_Use], asked: Asked | None, shown: Mapping[str, set[str]]
) -> _Use | None:
    """The use behind an id that a client made up: the first open one with tool and arguments.

    An id that stood in the asking call's own request already is an example or an older use.
    """
    if asked is None:
        return None
    for use in uses:
        if use.told is not None or asked.id in shown[use.call.id]:
            continue
        if use.asked.name == asked.name and (
            canonical(use.asked.arguments) == canonical(asked.arguments)
        ):
            return use
    return None


def _was_received(use: _Use, uses: Sequence[_Use]) -> bool:
    """Whether the agent had this tool call: what it went away from, or the choice of several that
    it did not take, it never used."""
    if use.spans or use.told:
        return True
    several = any(o.call.index == use.call.index and o.call.id != use.call.id for o in uses)
    return not use.call.superseded and not several


def _when(use: _Use) -> float:
    return use.spans[0].started if use.spans else use.call.ended


def _tool_use(use: _Use) -> ToolUse:
    result = next((found for span in use.spans if (found := _result(span)) is not None), None)
    if result is None and use.told is not None:
        result = use.told.text
    return ToolUse(
        name=use.asked.name,
        arguments=use.asked.arguments,
        result=result,
        outcome=_outcome(use),
        tool_call_id=use.asked.id or None,
        call_id=use.call.id,
        span_id=use.spans[0].id if use.spans else None,
        agent=use.call.agent,
        started=use.spans[0].started if use.spans else None,
        ended=use.spans[0].ended if use.spans else None,
    )


def _outcome(use: _Use) -> ToolOutcome:
    """What the spans say; what the model was told, where they say nothing."""
    seen = {span_outcome(span) for span in use.spans}
    # Two spans of one use come from two instrumentations; the one that saw a failure is right.
    for outcome in _WORST_FIRST:
        if outcome in seen:
            return outcome
    return told_outcome(use.told) if use.told else "unknown"


def _of_span(span: Span, agent_of: Mapping[str, str]) -> ToolUse:
    """A tool that an agent's own code used: no call asked for it."""
    return ToolUse(
        name=str(span.attributes.get(semconv.TOOL_NAME, "")),
        arguments=text_of(span.attributes.get(semconv.TOOL_ARGUMENTS)),
        result=_result(span),
        outcome=span_outcome(span),
        tool_call_id=str(span.attributes.get(semconv.TOOL_CALL_ID) or "") or None,
        span_id=span.id,
        agent=agent_of.get(span.id, ""),
        started=span.started,
        ended=span.ended,
    )


def _result(span: Span) -> str | None:
    found = span.attributes.get(semconv.TOOL_RESULT)
    return None if found is None else text_of(found)
