"""Whatever a policy writes: a stream put together says what the whole answer says."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateways import Face

PIECES = st.sampled_from(
    [
        "hello ",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "\n",
        "☃",
        "𝄞",
        '{"name": "add", "arguments": {"a": 1}}',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "<|im_start|>",
        "  ",
        "\u2028",
    ]
)
QUESTION = [{"role": "user", "content": "q"}]
PARAMETERS = {"type": "object", "properties": {}}


def chat_folded(events):
    """A message from the deltas of chat completions."""
    message, calls, finish = {"content": "", "reasoning": ""}, {}, None
    for body in events[:-1]:
        (choice,) = body["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or []:
            call = calls.setdefault(part["index"], {"name": "", "arguments": ""})
            for name in call:
                call[name] += part["function"].get(name) or ""
        finish = choice["finish_reason"] or finish
    assert events[-1] == "data: [DONE]"[6:]
    return message["content"], message["reasoning"], list(calls.values()), finish


def chat_whole(body):
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [
        {name: call["function"][name] for name in ("name", "arguments")}
        for call in message.get("tool_calls") or []
    ]
    content, reasoning = message["content"] or "", message.get("reasoning_content") or ""
    return content, reasoning, calls, choice["finish_reason"]


def completion_folded(events):
    texts = [body["choices"][0]["text"] for body in events[:-1] if body["choices"]]
    finish = [body["choices"][0]["finish_reason"] for body in events[:-1] if body["choices"]]
    return "".join(texts), next(filter(None, finish), None)


def completion_whole(body):
    (choice,) = body["choices"]
    return choice["text"], choice["finish_reason"]


def message_folded(events):
    """A message from Anthropic's events, checked for their order."""
    blocks, reason, open_block = [], None, None
    for body in events:
        match body["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = body["index"]
                assert open_block == len(blocks)
                blocks.append({**body["content_block"]})
            case "content_block_delta":
                assert body["index"] == open_block
                for name, field in (
                    ("text", "text"),
                    ("thinking", "thinking"),
                    ("partial_json", "json"),
                ):
                    if name in body["delta"]:
                        blocks[-1][field] = blocks[-1].get(field, "") + body["delta"][name]
            case "content_block_stop":
                assert body["index"] == open_block
                open_block = None
            case "message_delta":
                reason = body["delta"]["stop_reason"]
    assert events[-1]["type"] == "message_stop"
    return [block_said(block) for block in blocks], reason


def message_whole(body):
    return [block_said(block) for block in body["content"]], body["stop_reason"]


def block_said(block):
    given = block.get("input")
    if "json" in block:
        given = json.loads(block["json"] or "{}")
    return block["type"], block.get("text"), block.get("thinking"), block.get("name"), given


def response_folded(events):
    """Items from the events that complete them, and from their deltas: both must agree."""
    deltas: dict[str, str] = {}
    for number, body in enumerate(events):
        assert body["sequence_number"] == number
        if body["type"].endswith((".delta",)):
            deltas[body["item_id"]] = deltas.get(body["item_id"], "") + body["delta"]
    items = [body["item"] for body in events if body["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert [item_said(item) for item in items] == [item_said(item) for item in final["output"]]
    for item in items:
        said = item.get("arguments")
        if said is None:
            said = "".join(part["text"] for part in item["content"])
        assert deltas.get(item["id"], "") == said
    return [item_said(item) for item in items], final["status"]


def response_whole(body):
    return [item_said(item) for item in body["output"]], body["status"]


def item_said(item):
    texts = [part.get("text") for part in item.get("content") or []]
    return item["type"], texts, item.get("name"), item.get("arguments")


FUNCTION = {"name": "add", "parameters": PARAMETERS}
PROTOCOLS = {
    "chat": (
        "/chat/completions",
        {"messages": QUESTION, "tools": [{"type": "function", "function": FUNCTION}]},
        chat_folded,
        chat_whole,
    ),
    "completions": (
        "/completions",
        {"prompt": "q", "max_tokens": 500},
        completion_folded,
        completion_whole,
    ),
    "messages": (
        "/messages",
        {
            "messages": QUESTION,
            "max_tokens": 500,
            "tools": [{"name": "add", "input_schema": PARAMETERS}],
        },
        message_folded,
        message_whole,
    ),
    "responses": (
        "/responses",
        {"input": "q", "tools": [{"type": "function", **FUNCTION}]},
        response_folded,
        response_whole,
    ),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(PIECES | st.text(max_size=4), max_size=8).map("".join),
    noise=st.lists(st.integers(3, 300), max_size=4),
    ends=st.booleans(),
)
def test_a_stream_put_together_is_the_whole_answer(tokenizer, protocol, text, noise, ends):
    path, body, folded, whole = PROTOCOLS[protocol]

    async def compare():
        end = tokenizer.eos_token_id
        said = tokenizer.encode(text, add_special_tokens=False)
        reply = [i for i in said + noise if i != end] + [end] * ends
        face = Face(tokenizer, list(reply), list(reply))
        streamed = folded(await face.events(path, **body))
        assert streamed == whole(await face.ask(path, **body))
        first, second = face.calls
        assert first.completion_ids == second.completion_ids == tuple(reply)

    asyncio.run(compare())


ANSWERS = st.lists(
    st.sampled_from(
        [
            "hello ",
            "𝄞",
            "\n",
            "<",
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            '<tool_call>\n{"name":"add","arguments":{"a":1.0,  "b": "x"}}\n</tool_call>',
        ]
    ),
    min_size=1,
    max_size=3,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_in_any_tree_of_conversations_each_prompt_begins_with_what_it_continues(tokenizer, data):
    """Branches, repeats and several conversations side by side; answers as odd as tokens allow."""

    async def grow():
        letters = st.lists(st.integers(10, 300), max_size=3)
        face = Face(tokenizer, script=lambda _: replies.pop(0))
        told: list[tuple[list, str | None]] = [([], None)]
        """Histories, each with the call that it ends with."""
        for _ in range(data.draw(st.integers(2, 7), label="requests")):
            history, before = data.draw(st.sampled_from(told), label="history")
            calls = (history[-1].get("tool_calls") or []) if history else []
            asked = [
                {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls
            ] or [{"role": "user", "content": data.draw(st.sampled_from(["a", "b", "☃ "]))}]
            text = data.draw(ANSWERS, label="answer")
            odd = [i for i in data.draw(letters, label="odd") if i != tokenizer.eos_token_id]
            replies = [odd + face.ids(text + "<|im_end|>")]
            messages = [*history, *asked]
            answer = await face.ask(
                "/chat/completions",
                messages=messages,
                tools=[{"type": "function", "function": FUNCTION}],
            )
            call = face.calls[-1]
            known = {other.id: other for other in face.calls}
            if before is not None:
                assert call.drift is None
                assert call.parent is not None
                parent = known[call.parent]
                ours = known[before]
                assert parent.prompt_ids == ours.prompt_ids
                whole = parent.prompt_ids + parent.completion_ids
                assert call.prompt_ids[: len(whole)] == whole
                assert len(call.prompt_ids) > len(whole)
            told.append(([*messages, answer["choices"][0]["message"]], call.id))

    asyncio.run(grow())
