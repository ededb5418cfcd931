"""What happened in an attempt, put together from calls, spans and messages.

Calls are what the gateway saw; spans say which agent asked and how tools ended; where there are no
spans, the messages of the next request say what the model was told. Pure: records in, records out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from fulmen.credit.agents import prompt_name, response_id, span_agents, told_agents
from fulmen.credit.tools import tool_uses
from fulmen.schema import semconv
from fulmen.schema.records import Call, RolloutResult, Span, ToolUse


@dataclass(frozen=True, slots=True)
class Observed:
    """An attempt as credit sees it."""

    rollout_id: str
    attempt: int
    calls: tuple[Call, ...]
    """In order of arrival, each with the name of its agent."""
    tools: tuple[ToolUse, ...] = ()
    """In order of use."""
    call_of: Mapping[str, str] = field(default_factory=dict)
    """Id of a span to that of the one call that it is about: its own, or the one that asked for
    the tool."""
    agent_of: Mapping[str, str] = field(default_factory=dict)
    """Id of a span to the name of the agent it belongs to."""


def observe(result: RolloutResult) -> Observed:
    """Name the agent of every call, and find every use of a tool with its outcome.

    An agent's name is the first that is known of: the request's own word; `gen_ai.agent.name` of
    the nearest span, from the span of the answer upwards, else from the span that was open when the
    request was sent; else one made of system prompt and tool names.
    """
    agent_of = span_agents(result.spans)
    told = told_agents(result.calls, result.spans, agent_of)
    earlier = {response_id(call): call for call in reversed(result.calls)}
    calls = tuple(
        structs.replace(call, agent=told.get(call.id) or prompt_name(call, earlier))
        for call in sorted(result.calls, key=lambda call: (call.index, call.choice))
    )
    tools = tool_uses(calls, result.spans, told, agent_of)
    return Observed(
        rollout_id=result.rollout.id,
        attempt=result.attempt,
        calls=calls,
        tools=tools,
        call_of=_calls_of(calls, result.spans, tools),
        agent_of=agent_of,
    )


def _calls_of(
    calls: Sequence[Call], spans: Sequence[Span], tools: Sequence[ToolUse]
) -> dict[str, str]:
    found = {use.span_id: use.call_id for use in tools if use.span_id and use.call_id}
    choices = Counter(response_id(call) for call in calls)
    by_response = {response_id(call): call.id for call in calls}
    for span in spans:
        name = str(span.attributes.get(semconv.RESPONSE_ID, ""))
        # An answer of several choices is several calls; which one is meant, nobody says.
        if choices[name] == 1:
            found[span.id] = by_response[name]
    return found
