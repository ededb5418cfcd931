"""Who made a call: the agent's name, from what is surest to what is always there."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from fulmen.credit.bodies import offered_tools, system_prompt
from fulmen.schema import semconv
from fulmen.schema.records import Call, Span


def response_id(call: Call) -> str:
    """The id that the client saw: choices after the first have their number behind it.

    >>> from fulmen.schema.records import Call
    >>> response_id(Call(id="chatcmpl-ab-1", choice=1, rollout_id="r", attempt=1, index=0,
    ...     protocol="chat", prompt_ids=(), completion_ids=(), logprobs=(), versions=(),
    ...     temperature=1.0, top_p=1.0, finish_reason="stop"))
    'chatcmpl-ab'
    """
    return call.id.removesuffix(f"-{call.choice}") if call.choice else call.id


def span_agents(spans: Sequence[Span]) -> dict[str, str]:
    """Span id to the agent it belongs to: its own `gen_ai.agent.name`, else the nearest above it.

    Spans without one are left out.
    """
    by_id = {span.id: span for span in spans}
    found: dict[str, str] = {}
    for span in spans:
        above: Span | None = span
        seen: set[str] = set()
        while above is not None and above.id not in seen:
            name = above.attributes.get(semconv.AGENT_NAME)
            if isinstance(name, str) and name:
                found[span.id] = name
                break
            seen.add(above.id)
            above = by_id.get(above.parent or "")
    return found


def told_agents(
    calls: Sequence[Call], spans: Sequence[Span], agent_of: Mapping[str, str]
) -> dict[str, str]:
    """Call id to the name that the client or a span gives; calls of unknown agents are left out.

    A request's own word (`Call.agent`) wins over the span of its answer, and that over the span
    that was open when it was sent.
    """
    answered = {
        str(span.attributes[semconv.RESPONSE_ID]): span.id
        for span in spans
        if semconv.RESPONSE_ID in span.attributes and span.id in agent_of
    }
    found: dict[str, str] = {}
    for call in calls:
        own = answered.get(response_id(call), "")
        name = call.agent or agent_of.get(own) or agent_of.get(call.span_id or "")
        if name:
            found[call.id] = name
    return found


def prompt_name(call: Call, earlier: Mapping[str, Call]) -> str:
    """A name made of system prompt and tool names: the same for the same agent in every rollout.

    `earlier` are the attempt's calls by response id: a request that goes on from a response says
    nothing of what that one was told. An agent whose system prompt holds the task has a new name
    for every task; a header or spans give it a better one.
    """
    text, tools = system_prompt(call.request), sorted(offered_tools(call.request))
    seen = {call.id}
    before = _before(call, earlier)
    while not text and before is not None and before.id not in seen:
        text = system_prompt(before.request)
        seen.add(before.id)
        before = _before(before, earlier)
    digest = hashlib.sha256(json.dumps([text, tools]).encode()).hexdigest()
    return f"prompt-{digest[:8]}"


def _before(call: Call, earlier: Mapping[str, Call]) -> Call | None:
    request = call.request if isinstance(call.request, dict) else {}
    return earlier.get(str(request.get("previous_response_id")))
