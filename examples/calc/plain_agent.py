"""The calculator agent with nothing but the `openai` client.

As a function it is `plain_agent.py:solve`; as a command, `python plain_agent.py`, it reads the task
as JSON from standard input and prints its answer.
"""

import ast
import functools
import json
import operator
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

INSTRUCTIONS = "Use the calculator tool. Reply with <answer>."
LARGEST = 1e15
TURNS = 4

CALCULATOR: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "description": "expression",
                    "title": "Expression",
                    "type": "string",
                }
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
        "strict": False,
    },
}

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
def _client() -> OpenAI:
    return OpenAI()


def solve(task: dict) -> str:
    """Answer a word problem."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": task["question"]},
    ]
    content = ""
    for _ in range(TURNS):
        answer = _client().chat.completions.create(
            model="calc", messages=messages, tools=[CALCULATOR]
        )
        message = answer.choices[0].message
        content = message.content or ""
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        if not calls:
            return content
        messages.append(
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {
                            "name": call.function.name,
                            "arguments": call.function.arguments,
                        },
                    }
                    for call in calls
                ],
            }
        )
        for call in calls:
            result = answer_call(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return content


def answer_call(arguments: str) -> str:
    """Run the tool on arguments as the model wrote them; errors are answers, too."""
    try:
        return calculator(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "error: the calculator takes an expression as text"


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
