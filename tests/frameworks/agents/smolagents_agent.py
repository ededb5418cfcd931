"""smolagents: the agent that calls tools, and the one that writes code."""

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: What to work out.
    """
    return str(eval(expression))


def solve(task: dict) -> str:
    model = OpenAIServerModel("gpt-5-mini")
    agent = ToolCallingAgent([calculator], model, name="calculator_agent", max_steps=3)
    return str(agent.run(f"What is {task['expression']}?"))


def solve_with_code(task: dict) -> str:
    model = OpenAIServerModel("gpt-5-mini")
    agent = CodeAgent([calculator], model, name="calculator_agent", max_steps=3)
    return str(agent.run(f"What is {task['expression']}?"))
