"""How each framework is made to tell what its agents do.

One instrumentor for each, the one that was found to tell the truth (docs/tracing.md). None of them
is required: without its package, the agent's calls are still recorded by the gateway. Models'
clients (openai, litellm) are not instrumented: the gateway sees their calls better than they do.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Switch = Callable[[ModuleType], None]
"""Given the framework's module, make its spans go to the global tracer provider."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework and its instrumentor."""

    module: str
    """Importing it means that the framework is used."""
    switch: Switch
    distribution: str
    """The framework's own package; another module of the same name is left alone."""
    instrumentor: str | None = None
    """Package that has to be installed for it; None: the framework brings its own spans."""
    needs: str = ""
    """Module of that package."""
    otherwise: Switch | None = None
    """What is to be done to the framework where the package is missing."""

    @property
    def ready(self) -> bool:
        """Whether the instrumentor's package is there."""
        return not self.needs or _found(self.needs)

    @property
    def present(self) -> bool:
        """Whether it is this framework, and no module that happens to be called the same."""
        try:
            importlib.metadata.distribution(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return False
        return True


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def _instrument(place: str, /, **options: Any) -> Switch:  # noqa: ANN401 - as the instrumentor's
    """Call `module:Class().instrument(**options)`."""
    module, _, name = place.partition(":")

    def switch(_: ModuleType) -> None:
        instrumentor = getattr(importlib.import_module(module), name)()
        # Their lists of versions are narrower than what they work with: genai-langchain asks for
        # a package that LangGraph alone does not bring.
        instrumentor.instrument(skip_dep_check=True, **options)

    return switch


def _native(_: ModuleType) -> None:
    """The framework finds the global tracer provider by itself."""


def _no_upload(module: ModuleType) -> None:
    """The SDK would post every trace to a fixed address, with the rollout key."""
    module.set_trace_processors([])


def _agent_framework(_: ModuleType) -> None:
    observability = importlib.import_module("agent_framework.observability")
    # Otherwise its tool spans have neither arguments nor results.
    observability.enable_instrumentation(enable_sensitive_data=True)


def _pydantic_ai(module: ModuleType) -> None:
    module.Agent.instrument_all()


def _agentscope(_: ModuleType) -> None:
    """AgentScope traces agents that were given its middleware: give it to all."""
    agents = importlib.import_module("agentscope.agent")
    middleware = importlib.import_module("agentscope.middleware")
    original = agents.Agent.__init__

    @functools.wraps(original)
    def with_tracing(self: object, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        given = list(kwargs.get("middlewares") or [])
        if not any(isinstance(one, middleware.TracingMiddleware) for one in given):
            kwargs["middlewares"] = [*given, middleware.TracingMiddleware()]
        original(self, *args, **kwargs)

    agents.Agent.__init__ = with_tracing


FRAMEWORKS: tuple[Framework, ...] = (
    Framework(
        "langchain_core",
        _instrument("opentelemetry.instrumentation.genai.langchain:LangChainInstrumentor"),
        distribution="langchain-core",
        instrumentor="opentelemetry-instrumentation-genai-langchain",
        needs="opentelemetry.instrumentation.genai.langchain",
    ),
    Framework(
        "agents",
        _instrument(
            "opentelemetry.instrumentation.genai.openai_agents:OpenAIAgentsInstrumentor",
            disable_openai_trace_export=True,  # as _no_upload says
        ),
        distribution="openai-agents",
        instrumentor="opentelemetry-instrumentation-genai-openai-agents",
        needs="opentelemetry.instrumentation.genai.openai_agents",
        otherwise=_no_upload,
    ),
    Framework(
        "llama_index.core",
        _instrument("opentelemetry.instrumentation.genai.llama_index:LlamaIndexInstrumentor"),
        distribution="llama-index-core",
        instrumentor="opentelemetry-instrumentation-genai-llama-index",
        needs="opentelemetry.instrumentation.genai.llama_index",
    ),
    Framework(
        "crewai",
        _instrument("openinference.instrumentation.crewai:CrewAIInstrumentor"),
        distribution="crewai",
        instrumentor="openinference-instrumentation-crewai",
        needs="openinference.instrumentation.crewai",
    ),
    Framework(
        "smolagents",
        _instrument("openinference.instrumentation.smolagents:SmolagentsInstrumentor"),
        distribution="smolagents",
        instrumentor="openinference-instrumentation-smolagents",
        needs="openinference.instrumentation.smolagents",
    ),
    Framework("autogen_core", _native, distribution="autogen-core"),
    Framework("agent_framework", _agent_framework, distribution="agent-framework-core"),
    Framework("pydantic_ai", _pydantic_ai, distribution="pydantic-ai-slim"),
    Framework("agentscope", _agentscope, distribution="agentscope"),
)
