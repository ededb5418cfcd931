"""LlamaIndex's function agent."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI


def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str(eval(expression))


async def solve(task: dict) -> str:
    agent = FunctionAgent(
        name="calculator-agent",
        system_prompt="Use the calculator.",
        tools=[calculator],
        llm=OpenAI(model="gpt-5-mini"),
    )
    return str(await agent.run(f"What is {task['expression']}?"))
