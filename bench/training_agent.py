"""The agent that `training.py` trains: the example's own, over the standard library's HTTP.

TRL has no client between its loop and the model; this is the least that a program needs to be one
of its own. `solve_with_openai` is the example's agent as it is, with the `openai` client, whose own
work is three times that of this one. Both make three calls at most: AutoGen's `max_tool_iterations`
in the example, and what TRL makes.
"""

import http.client
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from calc import plain_agent

plain_agent.TURNS = 3
solve_with_openai = plain_agent.solve

_thread = threading.local()


def solve(task: dict[str, Any]) -> str:
    """Answer a word problem."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": plain_agent.INSTRUCTIONS},
        {"role": "user", "content": task["question"]},
    ]
    content = ""
    for _ in range(plain_agent.TURNS):
        message = _ask(messages)
        content = message["content"] or ""
        if not message.get("tool_calls"):
            return content
        messages.append(message)
        for call in message["tool_calls"]:
            result = plain_agent.answer_call(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return content


def _ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message, over a connection of the thread's own."""
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    if not hasattr(_thread, "connection"):
        _thread.connection = http.client.HTTPConnection(base.netloc)
    body = {"model": "calc", "messages": messages, "tools": [plain_agent.CALCULATOR]}
    _thread.connection.request(
        "POST",
        f"{base.path}/chat/completions",
        json.dumps(body),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        },
    )
    answer = json.load(_thread.connection.getresponse())
    return answer["choices"][0]["message"]
