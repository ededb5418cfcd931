"""Tracing without code: spans begin to come when an agent imports its framework."""

import functools
import os
import secrets
from collections.abc import Callable, Iterable
from types import ModuleType

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from fulmen.tracing.frameworks import FRAMEWORKS, Framework
from fulmen.tracing.imports import after_import
from fulmen.tracing.stream import SpanStream

# Tool arguments and results are kept only by instrumentors that are asked to.
_CAPTURE = {
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
}

Hint = Callable[[str], None]
"""Told, in one line, why a framework is not traced."""


class OwnIds(IdGenerator):
    """Ids that do not come from the global `random`: agents seed it, often with their task."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1


def switch_on(hint: Hint, frameworks: Iterable[Framework] = FRAMEWORKS) -> SpanStream:
    """Trace whatever framework is imported in this process from now on.

    Sets the process's tracer provider: OpenTelemetry allows it once.
    """
    for name, value in _CAPTURE.items():
        os.environ.setdefault(name, value)
    stream = SpanStream(hint)
    # Every span, whatever the environment says of sampling: a lost one is a lost outcome.
    resource = Resource({"service.name": "fulmen-agent"})
    provider = TracerProvider(
        sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False, id_generator=OwnIds()
    )
    provider.add_span_processor(stream)
    trace.set_tracer_provider(provider)
    after_import({one.module: functools.partial(_switch, one, hint) for one in frameworks})
    return stream


def _switch(framework: Framework, hint: Hint, module: ModuleType) -> None:
    """Never fails: an agent that cannot be traced is still an agent."""
    if not framework.present:
        return
    switch = framework.switch
    if not framework.ready:
        hint(
            f"{framework.distribution}: its agents and tools are not traced; "
            f"pip install {framework.instrumentor}"
        )
        switch = framework.otherwise
    try:
        if switch is not None:
            switch(module)
    except Exception as error:
        hint(f"{framework.distribution}: not traced ({type(error).__name__}: {error})")
