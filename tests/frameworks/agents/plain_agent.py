"""No framework: loops over OpenAI's and Anthropic's clients."""

import json

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
ABOUT = "Work out an arithmetic expression."
openai = AsyncOpenAI()
anthropic = AsyncAnthropic()


def calculator(expression: str) -> str:
    return str(eval(expression))


async def solve(task: dict) -> str:
    function = {"name": "calculator", "description": ABOUT, "parameters": SCHEMA}
    messages: list = [{"role": "user", "content": f"What is {task['expression']}?"}]
    while True:
        answer = await openai.chat.completions.create(
            model="gpt-5-mini",
            messages=messages,
            tools=[{"type": "function", "function": function}],
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            try:
                result = calculator(**json.loads(call.function.arguments))
            except Exception as error:
                result = f"Error: {error!r}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def solve_with_claude(task: dict) -> str:
    tool = {"name": "calculator", "description": ABOUT, "input_schema": SCHEMA}
    messages: list = [{"role": "user", "content": f"What is {task['expression']}?"}]
    while True:
        answer = await anthropic.messages.create(
            model="claude-haiku-4-5", max_tokens=500, messages=messages, tools=[tool]
        )
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            return answer.content[0].text
        results = []
        for use in uses:
            result: dict = {"type": "tool_result", "tool_use_id": use.id}
            try:
                result["content"] = calculator(**use.input)
            except Exception as error:
                result |= {"content": repr(error), "is_error": True}
            results.append(result)
        messages.append({"role": "user", "content": results})
