"""Agents of OpenAI's SDK: one with a tool, and one that hands over to it."""

from agents import Agent, Runner, function_tool


@function_tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str(eval(expression))


agent = Agent(
    name="calculator-agent",
    model="gpt-5-mini",
    instructions="Use the calculator.",
    tools=[calculator],
)
triage = Agent(
    name="triage",
    model="gpt-5-mini",
    instructions="Hand sums over to the calculator agent.",
    handoffs=[agent],
)


async def solve(task: dict) -> str:
    result = await Runner.run(agent, f"What is {task['expression']}?")
    return result.final_output


async def solve_with_handoff(task: dict) -> str:
    result = await Runner.run(triage, f"What is {task['expression']}?")
    return result.final_output
