"""A calculator agent in AutoGen's own style: one assistant, one tool. Nothing here knows Fulmen."""

import ast
import functools
import operator

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

INSTRUCTIONS = "Use the calculator tool. Reply with <answer>."
LARGEST = 1e15

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    try:
        if len(expression) > 60:
            raise ValueError("too long")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an expression of numbers, + - * / and parentheses"
    if not abs(value) < LARGEST:  # written so that it holds for NaN too
        return "error: the result is too large"
    return str(int(value)) if value == int(value) else f"{value:.2f}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        if isinstance(node.value, bool):  # an int to Python
            raise ValueError("not a number")
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("not arithmetic")


@functools.cache
def _client() -> OpenAIChatCompletionClient:
    """One client for all tasks; where it sends to and as whom is in the environment."""
    info = ModelInfo(
        vision=False,
        function_calling=True,
        json_output=False,
        family="unknown",
        structured_output=False,
    )
    return OpenAIChatCompletionClient(model="calc", model_info=info)


async def solve(task: dict) -> str:
    """Answer a word problem."""
    agent = AssistantAgent(
        "calc",
        model_client=_client(),
        tools=[calculator],
        system_message=INSTRUCTIONS,
        max_tool_iterations=3,
    )
    result = await agent.run(task=task["question"])
    last = result.messages[-1]
    return last.content if isinstance(last, TextMessage) else ""
