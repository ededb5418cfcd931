"""Microsoft Agent Framework's agent, over responses and over chat completions."""

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient


@tool(approval_mode="never_require")
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str(eval(expression))


def _agent(client) -> Agent:
    return Agent(client, "Use the calculator.", name="calculator-agent", tools=[calculator])


responses = _agent(OpenAIChatClient(model="gpt-5-mini"))
chat = _agent(OpenAIChatCompletionClient(model="gpt-5-mini"))


async def solve(task: dict) -> str:
    result = await responses.run(f"What is {task['expression']}?")
    return result.text


async def solve_with_chat(task: dict) -> str:
    result = await chat.run(f"What is {task['expression']}?")
    return result.text
