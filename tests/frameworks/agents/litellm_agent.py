"""No framework but LiteLLM's client, with OpenAI's protocol and with Anthropic's."""

import json

import litellm

FUNCTION = {
    "name": "calculator",
    "description": "Work out an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]


def calculator(expression: str) -> str:
    return str(eval(expression))


async def _solve(task: dict, model: str) -> str:
    messages: list = [{"role": "user", "content": f"What is {task['expression']}?"}]
    while True:
        answer = await litellm.acompletion(model=model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            try:
                result = calculator(**json.loads(call.function.arguments))
            except Exception as error:
                result = f"Error: {error!r}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def solve(task: dict) -> str:
    return await _solve(task, "openai/gpt-5-mini")


async def solve_with_claude(task: dict) -> str:
    return await _solve(task, "anthropic/claude-haiku-4-5")
