"""AutoGen's assistant with a tool, and a team of two."""

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, SourceMatchTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=False,
    family="unknown",
    structured_output=False,
)
client = OpenAIChatCompletionClient(model="gpt-5-mini", model_info=INFO)


async def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str(eval(expression))


def _calculates(name: str) -> AssistantAgent:
    return AssistantAgent(
        name,
        client,
        tools=[calculator],
        system_message="Use the calculator.",
        reflect_on_tool_use=True,
    )


async def solve(task: dict) -> str:
    agent = _calculates("calculator_agent")
    result = await agent.run(task=f"What is {task['expression']}?")
    return result.messages[-1].to_text()


async def solve_as_team(task: dict) -> str:
    writer = _calculates("writer")
    reviewer = AssistantAgent("reviewer", client, system_message="Review the answer.")
    end = SourceMatchTermination(["reviewer"]) | MaxMessageTermination(10)
    team = RoundRobinGroupChat([writer, reviewer], termination_condition=end)
    result = await team.run(task=f"What is {task['expression']}?")
    return result.messages[-1].to_text()
