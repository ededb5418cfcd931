"""What each framework's agents do, and what can be seen of it."""

from dataclasses import dataclass
from typing import Literal

AGENT = "calculator-agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One agent, run on tasks that its tool can do and on tasks that make its tool raise."""

    environment: str
    agent: str
    """`file.py:function` in the folder `agents`."""
    protocol: Literal["chat", "responses", "messages"] = "chat"
    callers: tuple[str, ...] = (AGENT, AGENT)
    """The agent behind each call of a rollout, in order."""
    user: str | None = AGENT
    """The agent whose span the tools' spans are under."""
    aborts: bool = False
    """Whether an exception of the tool ends the rollout."""
    continues: bool = True
    """Whether its second prompt is the first and what came of it. AutoGen reflects without tools,
    smolagents tells the past in its own words, and another agent is told something else."""
    tools: tuple[str, ...] = ("calculator",)
    """The tools that are used, in order; handing over is none."""
    traced: bool = True
    """Whether spans say who called and how tools ended; without them, the gateway alone does."""
    response_ids: bool = True
    """Whether a span of every call carries the call's id."""
    tool_call_ids: bool = True
    """Whether a tool's span carries the id by which the model asked for it."""
    values: bool = True
    """Whether a tool's span says what it was given and what it gave."""

    @property
    def name(self) -> str:
        """Names the case in a test's id."""
        function = self.agent.partition(":")[2].removeprefix("solve").strip("_")
        return f"{self.environment}-{function}" if function else self.environment


CASES = [
    Case(environment="langgraph", agent="langgraph_agent.py:solve", aborts=True),
    Case(
        environment="langgraph",
        agent="langgraph_agent.py:solve_with_claude",
        protocol="messages",
        aborts=True,
    ),
    Case(
        environment="langgraph",
        agent="langgraph_agent.py:solve_with_graph",
        callers=("writer", "writer", "reviewer"),
        user=None,
    ),
    Case(
        environment="openai-agents",
        agent="openai_agents_agent.py:solve",
        protocol="responses",
        response_ids=False,
        tool_call_ids=False,
    ),
    Case(
        environment="openai-agents",
        agent="openai_agents_agent.py:solve_with_handoff",
        protocol="responses",
        callers=("triage", AGENT, AGENT),
        continues=False,
        response_ids=False,
        tool_call_ids=False,
    ),
    Case(
        environment="autogen",
        agent="autogen_agent.py:solve",
        callers=("calculator_agent", "calculator_agent"),
        user="calculator_agent",
        continues=False,
        response_ids=False,
        values=False,
    ),
    Case(
        environment="autogen",
        agent="autogen_agent.py:solve_as_team",
        callers=("writer", "writer", "reviewer"),
        user="writer",
        continues=False,
        response_ids=False,
        values=False,
    ),
    Case(
        environment="pydantic-ai",
        agent="pydantic_ai_agent.py:solve",
        protocol="responses",
        aborts=True,
    ),
    Case(environment="pydantic-ai", agent="pydantic_ai_agent.py:solve_with_chat", aborts=True),
    Case(
        environment="pydantic-ai",
        agent="pydantic_ai_agent.py:solve_with_claude",
        protocol="messages",
        aborts=True,
    ),
    Case(environment="maf", agent="maf_agent.py:solve", protocol="responses"),
    Case(environment="maf", agent="maf_agent.py:solve_with_chat"),
    Case(
        environment="crewai", agent="crewai_agent.py:solve", response_ids=False, tool_call_ids=False
    ),
    Case(environment="llamaindex", agent="llamaindex_agent.py:solve", response_ids=False),
    Case(
        environment="smolagents",
        agent="smolagents_agent.py:solve",
        callers=("calculator_agent", "calculator_agent"),
        user="calculator_agent",
        continues=False,
        response_ids=False,
        tools=("calculator", "final_answer"),
        tool_call_ids=False,
    ),
    Case(
        environment="smolagents",
        agent="smolagents_agent.py:solve_with_code",
        callers=("calculator_agent", "calculator_agent"),
        user="calculator_agent",
        continues=False,
        response_ids=False,
        tools=("calculator", "final_answer"),
        tool_call_ids=False,
    ),
    Case(environment="agentscope", agent="agentscope_agent.py:solve"),
    Case(
        environment="plain", agent="plain_agent.py:solve", callers=("", ""), user=None, traced=False
    ),
    Case(
        environment="plain",
        agent="plain_agent.py:solve_with_claude",
        protocol="messages",
        callers=("", ""),
        user=None,
        traced=False,
    ),
    Case(
        environment="litellm",
        agent="litellm_agent.py:solve",
        callers=("", ""),
        user=None,
        traced=False,
    ),
    Case(
        environment="litellm",
        agent="litellm_agent.py:solve_with_claude",
        protocol="messages",
        callers=("", ""),
        user=None,
        traced=False,
    ),
]
