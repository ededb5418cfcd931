"""Spans leave the agent's process when they start and when they end.

So an agent that is killed leaves the span that was running, open, and everything before it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.trace import StatusCode, get_current_span

from fulmen.schema.headers import AGENT, TRACEPARENT, encode_agent
from fulmen.schema.records import Span
from fulmen.schema.semconv import AGENT_NAME, INVOKE_AGENT, OPERATION
from fulmen.tracing.current import Attempt, current_attempt, langgraph_agent
from fulmen.tracing.normalise import Raw, Status, normalise

_STATUS: dict[StatusCode, Status] = {
    StatusCode.UNSET: "unset",
    StatusCode.OK: "ok",
    StatusCode.ERROR: "error",
}
_NANOSECONDS = 1e9


@dataclass(frozen=True, slots=True)
class _Open:
    """A span under way."""

    attempt: Attempt
    span: ReadableSpan
    """It may still be given its attributes."""


class SpanStream(SpanProcessor):
    """Hands every span of an attempt on, at its start and at its end."""

    def __init__(self, hint: Callable[[str], None] = lambda _: None) -> None:
        """`hint` is told of spans that could not be read; they never fail the agent."""
        self._hint = hint
        self._open: dict[int, _Open] = {}

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:  # noqa: ARG002
        """Send a span that is not over."""
        context = span.get_span_context()
        above = self._open.get(span.parent.span_id) if span.parent else None
        # A framework's own threads may have lost the context, or kept that of an earlier attempt.
        attempt = above.attempt if above else current_attempt.get()
        if attempt is None or context is None:
            return
        self._open[context.span_id] = _Open(attempt, span)
        self._emit(span, attempt)

    def on_end(self, span: ReadableSpan) -> None:
        """Send the span as it turned out."""
        context = span.get_span_context()
        opened = self._open.pop(context.span_id, None) if context is not None else None
        if opened is not None:
            self._emit(span, opened.attempt)

    def _emit(self, span: ReadableSpan, attempt: Attempt) -> None:
        try:
            attempt.emit(_record(span, attempt))
        except Exception as error:
            self._hint(f"a span of {span.instrumentation_scope} is lost ({error!r})")

    def agent(self) -> str:
        """The agent that the running code is the work of: that of the nearest open span."""
        opened = self._open.get(get_current_span().get_span_context().span_id)
        while opened is not None:
            attributes = normalise(_raw(opened.span))
            if attributes.get(OPERATION) == INVOKE_AGENT and (name := attributes.get(AGENT_NAME)):
                return str(name)
            parent = opened.span.parent
            opened = self._open.get(parent.span_id) if parent is not None else None
        return ""

    def headers(self) -> dict[str, str]:
        """What a request to the gateway says about who sends it."""
        context = get_current_span().get_span_context()
        found: dict[str, str] = {}
        if context.span_id in self._open:
            found[TRACEPARENT] = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
        try:
            agent = langgraph_agent() or self.agent()
        except Exception as error:
            self._hint(f"the agent of a request is not known ({error!r})")
            return found
        if agent.strip():
            found[AGENT] = encode_agent(agent)
        return found

    def forget(self, attempt: Attempt) -> None:
        """Drop what an attempt that has ended left open; it stays open on record."""
        # A copy: threads that the agent left behind may still begin and end spans.
        for span_id in [key for key, one in list(self._open.items()) if one.attempt is attempt]:
            self._open.pop(span_id, None)


def _record(span: ReadableSpan, attempt: Attempt) -> Span:
    context, parent, raw = span.get_span_context(), span.parent, _raw(span)
    assert context is not None
    return Span(
        id=f"{context.span_id:016x}",
        rollout_id=attempt.rollout_id,
        attempt=attempt.number,
        # A remote parent is in another process: for the root, it is nowhere.
        parent=None if parent is None or parent.is_remote else f"{parent.span_id:016x}",
        name=span.name,
        attributes=normalise(raw),
        status=raw.status,
        started=(span.start_time or 0) / _NANOSECONDS,
        ended=None if span.end_time is None else span.end_time / _NANOSECONDS,
    )


def _raw(span: ReadableSpan) -> Raw:
    return Raw(
        name=span.name,
        scope=span.instrumentation_scope.name if span.instrumentation_scope else "",
        attributes=span.attributes or {},
        status=_STATUS[span.status.status_code],
        description=span.status.description or "",
        exceptions=[event.attributes or {} for event in span.events if event.name == "exception"],
        ended=span.end_time is not None,
    )
