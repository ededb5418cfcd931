"""Every instrumentor's dialect, read as OpenTelemetry's GenAI conventions.

What is needed further on gets its one name (`fulmen.schema.semconv`); everything else stays as it
came, long texts cut. Nothing is concluded from a status that was never set: a tool's outcome
follows from an error that was recorded or from an end without one, whatever the framework wrote.

Source: measured with each framework; see docs/tracing.md.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fulmen.schema.records import JSON, ToolOutcome
from fulmen.schema.semconv import (
    AGENT_NAME,
    CHAT,
    ERROR_MESSAGE,
    ERROR_TYPE,
    EXECUTE_TOOL,
    INVOKE_AGENT,
    INVOKE_WORKFLOW,
    OPERATION,
    RESPONSE_ID,
    SOURCE,
    TOOL_ARGUMENTS,
    TOOL_CALL_ID,
    TOOL_NAME,
    TOOL_OUTCOME,
    TOOL_RESULT,
)

MOST_CHARACTERS = 4096
"""Longer attribute values are cut: what was said to the model is on record with its calls."""

Status = Literal["unset", "ok", "error"]


@dataclass(frozen=True, slots=True)
class Raw:
    """A span as its instrumentor made it."""

    name: str
    scope: str = ""
    """The instrumentation scope."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    status: Status = "unset"
    description: str = ""
    """Of the status."""
    exceptions: Sequence[Mapping[str, Any]] = ()
    """Attributes of its exception events."""
    ended: bool = True


def normalise(raw: Raw) -> dict[str, JSON]:
    """Attributes of a span under the conventions' names.

    >>> tool = Raw("calculator", attributes={"openinference.span.kind": "TOOL",
    ...     "tool.name": "calculator", "output.value": "42"}, status="ok")
    >>> {key: value for key, value in normalise(tool).items() if key.startswith("gen_ai.")}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'gen_ai.operation.name': 'execute_tool', 'gen_ai.tool.name': 'calculator',
     'gen_ai.tool.call.result': '42'}
    """
    result = {key: _plain(value) for key, value in raw.attributes.items()}
    for dialect in _DIALECTS:
        for key, value in dialect(raw).items():
            if value not in (None, ""):
                result.setdefault(key, _plain(value))
    if raw.scope:
        result[SOURCE] = raw.scope
    if raw.exceptions:
        error = raw.exceptions[-1]
        result.setdefault(ERROR_TYPE, str(error.get("exception.type", "_OTHER")))
        result.setdefault(ERROR_MESSAGE, _plain(str(error.get("exception.message", ""))))
    elif raw.status == "error" and raw.description:
        result.setdefault(ERROR_MESSAGE, _plain(raw.description))
    if result.get(OPERATION) == EXECUTE_TOOL:
        result[TOOL_OUTCOME] = _outcome(raw, result)
    return result


def _outcome(raw: Raw, attributes: Mapping[str, JSON]) -> ToolOutcome:
    """How a tool's span says that it ended.

    >>> _outcome(Raw("t", ended=False), {}), _outcome(Raw("t"), {"error.type": "TimeoutError"})
    ('unknown', 'timeout')
    """
    error = str(attributes.get(ERROR_TYPE, ""))
    if "timeout" in error.lower():
        return "timeout"
    if raw.status == "error" or error or raw.exceptions:
        return "error"
    if not raw.ended:
        return "unknown"
    if _AGENTSCOPE_ERROR in str(raw.attributes.get(TOOL_RESULT, "")):
        return "error"
    return "ok"


_AGENTSCOPE_ERROR = "ToolResultState.ERROR"
"""AgentScope's spans of failed tools end well; only the text of the result knows better."""


def _plain(value: Any) -> JSON:  # noqa: ANN401 - attribute values of any instrumentor
    """A JSON value of bounded size."""
    if isinstance(value, str):
        # A subclass (smolagents' texts are) and half a surrogate pair could not be sent.
        text = str.__str__(value).encode(errors="replace").decode()
        return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in value]
    return str(value)[:MOST_CHARACTERS]


_OPENINFERENCE_KINDS = {
    "LLM": CHAT,
    "TOOL": EXECUTE_TOOL,
    "AGENT": INVOKE_AGENT,
    "CHAIN": INVOKE_WORKFLOW,
}


def _openinference(raw: Raw) -> dict[str, Any]:
    """OpenInference (CrewAI, smolagents, LiteLLM and whatever else a user brings)."""
    given = raw.attributes
    kind = _OPENINFERENCE_KINDS.get(str(given.get("openinference.span.kind", "")))
    if kind is None:
        return {}
    if kind == EXECUTE_TOOL:
        return {
            OPERATION: kind,
            TOOL_NAME: given.get("tool.name") or raw.name.removesuffix(".run"),
            # "tool.parameters" is what the tool may be given, not what it was.
            TOOL_ARGUMENTS: _arguments(given.get("input.value")),
            TOOL_RESULT: given.get("output.value"),
            TOOL_CALL_ID: given.get("tool_call.id") or given.get("tool.call_id"),
        }
    if kind == INVOKE_AGENT:
        name = given.get("agent.name") or given.get("graph.node.id")
        return {OPERATION: kind, AGENT_NAME: name or raw.name.removesuffix(".run")}
    if kind == CHAT:
        return {OPERATION: kind, RESPONSE_ID: _id_in(given.get("output.value"))}
    return {OPERATION: kind}


def _arguments(given: Any) -> Any:  # noqa: ANN401 - an attribute's value
    """What a tool was given, without what smolagents puts around it.

    >>> _arguments('{"args": [], "sanitize_inputs_outputs": true, "kwargs": {"city": "Bern"}}')
    '{"city": "Bern"}'
    >>> _arguments('{"city": "Bern"}')
    '{"city": "Bern"}'
    """
    try:
        call = json.loads(str(given))
    except ValueError:
        return given
    if not isinstance(call, dict) or call.keys() != {"args", "sanitize_inputs_outputs", "kwargs"}:
        return given
    return json.dumps(call["kwargs"] or call["args"], ensure_ascii=False)


def _id_in(output: object) -> str | None:
    """The response's id, where a model's whole answer was kept as JSON text."""
    try:
        answer = json.loads(str(output))
    except ValueError:
        return None
    found = answer.get("id") if isinstance(answer, dict) else None
    return found if isinstance(found, str) else None


_TRACELOOP_KINDS = {
    "tool": EXECUTE_TOOL,
    "agent": INVOKE_AGENT,
    "workflow": INVOKE_WORKFLOW,
    "task": INVOKE_WORKFLOW,
}


def _traceloop(raw: Raw) -> dict[str, Any]:
    """Traceloop's OpenLLMetry: not switched on by us, but processes that have it may send it."""
    given = raw.attributes
    kind = _TRACELOOP_KINDS.get(str(given.get("traceloop.span.kind", "")))
    name = given.get("traceloop.entity.name")
    if kind == EXECUTE_TOOL:
        return {
            OPERATION: kind,
            TOOL_NAME: name,
            TOOL_ARGUMENTS: given.get("traceloop.entity.input"),
            TOOL_RESULT: given.get("traceloop.entity.output"),
        }
    return {OPERATION: kind, AGENT_NAME: name if kind == INVOKE_AGENT else None}


def _older_names(raw: Raw) -> dict[str, Any]:
    """Names that came before the conventions': pydantic-ai's tools, `logfire`'s agents."""
    given = raw.attributes
    return {
        AGENT_NAME: given.get("agent_name"),
        TOOL_ARGUMENTS: given.get("tool_arguments") or given.get("gen_ai.tool.arguments"),
        TOOL_RESULT: given.get("tool_response") or given.get("gen_ai.tool.result"),
    }


_DIALECTS: tuple[Callable[[Raw], dict[str, Any]], ...] = (_openinference, _traceloop, _older_names)
