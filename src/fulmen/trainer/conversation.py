"""What an attempt said and did, as a grader or a reader wants it: messages and tool calls."""

from typing import Any

from fulmen.schema.records import JSON, RolloutResult


def messages_of(result: RolloutResult) -> list[dict[str, JSON]]:
    """The conversation of the attempt's last call: its request's messages and its answer.

    Empty if the agent called no model, or only by a protocol without messages.
    """
    for call in reversed([call for call in result.calls if call.status < 400]):
        request, response = call.request, call.response
        if isinstance(request, dict) and isinstance(request.get("messages"), list):
            answer = [response] if isinstance(response, dict) else []
            return [*request["messages"], *answer]
    return []


def tools_of(messages: list[dict[str, JSON]]) -> list[dict[str, JSON]]:
    """The tool calls of a conversation, in order: name, arguments (text), result (or None).

    >>> tools_of([
    ...     {"role": "assistant", "tool_calls": [
    ...         {"id": "1", "function": {"name": "add", "arguments": "[1, 2]"}}]},
    ...     {"role": "tool", "tool_call_id": "1", "content": "3"}])
    [{'name': 'add', 'arguments': '[1, 2]', 'result': '3'}]
    """
    results = {m.get("tool_call_id"): m.get("content") for m in messages if m.get("role") == "tool"}
    calls: list[dict[str, Any]] = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            calls.append(
                {
                    "name": function.get("name"),
                    "arguments": function.get("arguments"),
                    "result": results.get(call.get("id")),
                }
            )
    return calls
