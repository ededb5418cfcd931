"""An attempt of a function under observation: its spans and rewards go to the pool."""

import functools

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from fulmen.runner.running import Runner
from fulmen.runner.wire import Hint, Reports, Rewarded, Seen, Start
from fulmen.schema.records import Outcome, Record, Reward, Span
from fulmen.schema.semconv import SOURCE
from fulmen.tracing.current import Attempt, current_attempt
from fulmen.tracing.stream import SpanStream

ROOT = "fulmen.rollout"
"""Name of the span that all others of an attempt are under."""


def observed(run: Runner, reports: Reports, spans: SpanStream | None) -> Runner:
    """The runner with everything its attempts show sent to the pool as it happens."""
    emit = functools.partial(_emit, reports)

    async def observing(start: Start) -> Outcome:
        attempt = Attempt(start.rollout_id, start.attempt, emit)
        current_attempt.set(attempt)
        if spans is None:
            return await run(start)
        try:
            return await _under_root(run, start, attempt)
        finally:
            spans.forget(attempt)

    return observing


async def _under_root(run: Runner, start: Start, attempt: Attempt) -> Outcome:
    # A parent that exists nowhere gives the trace its id.
    trace_id = attempt.trace_id
    above = SpanContext(
        trace_id, trace_id & (2**64 - 1) or 1, is_remote=True, trace_flags=TraceFlags(1)
    )
    tracer = trace.get_tracer("fulmen")
    context = trace.set_span_in_context(NonRecordingSpan(above))
    with tracer.start_as_current_span(ROOT, context=context) as root:
        outcome = await run(start)
        if outcome.failure is not None:
            root.set_status(trace.StatusCode.ERROR, outcome.error)
        return outcome


def _emit(reports: Reports, record: Record) -> None:
    if isinstance(record, Span):
        try:
            reports.send(Seen(span=record))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # In the middle of the agent's work: what cannot be told must not fail it.
            reports.send(Hint(text=f"a span of {record.attributes.get(SOURCE)} is lost ({error})"))
    elif isinstance(record, Reward):
        reports.send(Rewarded(reward=record))
