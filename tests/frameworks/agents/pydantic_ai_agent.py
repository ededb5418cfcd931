"""Pydantic AI's agent with each of the three protocols."""

from pydantic_ai import Agent


def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str(eval(expression))


def _agent(model: str) -> Agent:
    return Agent(
        model, name="calculator-agent", instructions="Use the calculator.", tools=[calculator]
    )


responses = _agent("openai:gpt-5-mini")
chat = _agent("openai-chat:gpt-5-mini")
messages = _agent("anthropic:claude-haiku-4-5")


async def solve(task: dict) -> str:
    result = await responses.run(f"What is {task['expression']}?")
    return result.output


async def solve_with_chat(task: dict) -> str:
    result = await chat.run(f"What is {task['expression']}?")
    return result.output


async def solve_with_claude(task: dict) -> str:
    result = await messages.run(f"What is {task['expression']}?")
    return result.output
