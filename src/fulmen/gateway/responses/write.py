"""OpenAI's responses: the answer as an object, whole or under way."""

from collections.abc import Mapping

from fulmen.gateway import ids
from fulmen.gateway.exchange import Choice, Exchange
from fulmen.gateway.responses.read import is_stored
from fulmen.schema.records import JSON

_ECHOED: Mapping[str, JSON] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that the response repeats, with their values if they were not given."""


def response_body(
    exchange: Exchange, status: str = "", *, output: list[JSON] | None = None, error: JSON = None
) -> dict[str, JSON]:
    """The response; `status` and `output` are those of the finished answer unless given."""
    given = exchange.request.body
    (choice,) = exchange.choices
    cut = choice.finish_reason == "length"
    status = status or ("incomplete" if cut else "completed")
    done = status in ("completed", "incomplete")
    echoed = {name: given[name] if given.get(name) is not None else value
              for name, value in _ECHOED.items()}  # fmt: skip
    return {
        "id": exchange.id,
        "object": "response",
        "created_at": int(exchange.started),
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": exchange.request.model,
        "output": output_items(exchange, choice) if output is None else output,
        "store": is_stored(given),
        "temperature": exchange.temperature,
        "top_p": exchange.top_p,
        "usage": _usage(exchange) if done else None,
        **echoed,
    }


def output_items(exchange: Exchange, choice: Choice) -> list[JSON]:
    """Reasoning, text and calls of a finished answer, in this order."""
    answer = choice.answer
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    items: list[JSON] = []
    if answer.reasoning:
        items.append(reasoning_item(exchange, answer.reasoning, status))
    if answer.content or not (answer.reasoning or answer.tool_calls):
        part = text_part(answer.content, text_logprobs(exchange, choice))
        items.append(message_item(exchange, [part], status))
    items += call_items(exchange, choice)
    return items


def reasoning_item(exchange: Exchange, text: str, status: str) -> dict[str, JSON]:
    """What the model thought."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "id": ids.part_id("rs_", exchange.key, 0, 0),
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": content,
    }


def message_item(exchange: Exchange, content: list[JSON], status: str) -> dict[str, JSON]:
    """What the model said."""
    return {
        "id": ids.part_id("msg_", exchange.key, 0, 0),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def text_part(text: str, logprobs: list[JSON]) -> dict[str, JSON]:
    """The text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_items(exchange: Exchange, choice: Choice, status: str = "completed") -> list[JSON]:
    """The tools that the model calls."""
    pairs = zip(choice.tool_call_ids, choice.answer.tool_calls, strict=True)
    return [
        {
            "id": ids.part_id("fc_", exchange.key, 0, number),
            "type": "function_call",
            "status": status,
            "call_id": call_id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for number, (call_id, call) in enumerate(pairs)
    ]


def text_logprobs(exchange: Exchange, choice: Choice) -> list[JSON]:
    """Of every sampled token, if they were asked for."""
    if not exchange.request.logprobs:
        return []
    completion = choice.completion

    def entry(token: int, logprob: float) -> dict[str, JSON]:
        text = exchange.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return [
        {
            **entry(token, logprob),
            "top_logprobs": [
                entry(*likely) for likely in (completion.top[place] if completion.top else ())
            ],
        }
        for place, (token, logprob) in enumerate(
            zip(completion.ids, completion.logprobs, strict=True)
        )
    ]


def _usage(exchange: Exchange) -> dict[str, JSON]:
    prompt, completion = exchange.prompt_tokens, exchange.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
