"""A crew of one agent with a tool."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("calculator")
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str(eval(expression))


async def solve(task: dict) -> str:
    agent = Agent(
        role="calculator-agent",
        goal="Work out sums",
        backstory="Uses the calculator.",
        tools=[calculator],
        llm=LLM(model="openai/gpt-5-mini"),
    )
    work = Task(
        description=f"What is {task['expression']}?", expected_output="a number", agent=agent
    )
    result = await Crew(agents=[agent], tasks=[work]).kickoff_async()
    return result.raw
