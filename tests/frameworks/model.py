"""A policy that does what a task needs: it calls the tool, and says something when it has heard."""

import json
import re
from collections.abc import Callable
from typing import Any

END = "<|im_end|>"

_QUESTION = re.compile(r"What is (\d+[*/]\d+)\?")
_TOOLS = re.compile(r"<tools>\n(\{.*?\})\n</tools>", re.DOTALL)


def script(tokenizer: Any) -> Callable[[tuple[int, ...]], list[int]]:
    """What a scripted engine says, as tokens."""

    def complete(prompt: tuple[int, ...]) -> list[int]:
        return tokenizer.encode(reply(tokenizer.decode(prompt)) + END, add_special_tokens=False)

    return complete


def reply(prompt: str) -> str:
    """The answer to a prompt in Qwen3's format.

    Whoever can hand over does; whoever has the calculator uses it once; whoever writes code writes
    it; and whoever must end with a tool does.

    >>> reply("<|im_start|>user\\nWhat is 6*7?")
    '6*7 is done'
    """
    expression = _QUESTION.findall(prompt)[-1]
    since = prompt.rsplit(f"What is {expression}?", 1)[1]
    asked = re.search(rf"""(expression['"]: |calculator\()['"]{re.escape(expression)}['"]""", since)
    tools = _tools(prompt)
    answer = f"{expression} is done"
    for tool in tools:
        if tool.startswith("transfer_to_"):
            return _call(tool, {})
    if "calculator" in tools and not asked:
        return _call("calculator", {"expression": expression})
    if "def calculator(" in prompt:
        code = f"final_answer({answer!r})" if asked else f"print(calculator('{expression}'))"
        return f"Thought: I calculate.\n<code>\n{code}\n</code>"
    if "final_answer" in tools:
        return _call("final_answer", {"answer": answer})
    return answer


def _tools(prompt: str) -> list[str]:
    """Names of the tools that the prompt offers."""
    offered = _TOOLS.search(prompt)
    lines = offered[1].splitlines() if offered else []
    return [json.loads(line)["function"]["name"] for line in lines]


def _call(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
