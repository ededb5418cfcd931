"""OpenAI's responses: items in, items out, and answers that later requests refer to."""

import itertools
from typing import Any

import pytest

from gateways import Face

PATH = "/responses"
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def kinds(answer) -> list[str]:
    return [item["type"] for item in answer["output"]]


def chained(calls) -> bool:
    """Whether each call's prompt begins with the one before it, token for token."""
    pairs = itertools.pairwise(calls)
    return all(
        after.parent == before.id
        and after.prompt_ids[: len(before.prompt_ids + before.completion_ids)]
        == before.prompt_ids + before.completion_ids
        for before, after in pairs
    )


async def test_an_answer_is_a_list_of_items(tokenizer):
    face = Face(tokenizer, f"<think>hm</think>let me see {CALL}{CALL}")
    answer = await face.ask(PATH, input="q", instructions="Be brief.", tools=TOOLS)
    assert kinds(answer) == ["reasoning", "message", "function_call", "function_call"]
    assert answer["output"][1]["content"][0]["text"] == "let me see"
    assert answer["output"][2]["arguments"] == '{"a": 1}'
    assert (answer["status"], answer["instructions"]) == ("completed", "Be brief.")
    (call,) = face.calls
    assert (call.id, call.protocol) == (answer["id"], "responses")
    assert "Be brief." in tokenizer.decode(call.prompt_ids)


async def test_a_conversation_by_reference_continues_the_sampled_tokens(tokenizer):
    face = Face(tokenizer, CALL, "one", "bye")
    first = await face.ask(PATH, input="q", tools=TOOLS, instructions="Add.")
    result = {
        "type": "function_call_output",
        "call_id": first["output"][0]["call_id"],
        "output": "1",
    }
    more = {"tools": TOOLS, "instructions": "Add."}
    second = await face.ask(PATH, input=[result], previous_response_id=first["id"], **more)
    await face.ask(PATH, input="thanks", previous_response_id=second["id"], **more)
    assert chained(face.calls)


async def test_a_conversation_by_value_continues_the_sampled_tokens(tokenizer):
    face = Face(tokenizer, f"I add{CALL}{CALL}", "two", "bye")
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]
    for _ in range(3):
        answer = await face.ask(PATH, input=items, tools=TOOLS, store=False)
        items += answer["output"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        items += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
            for call in calls
        ] or [{"role": "user", "content": "go on"}]
    assert chained(face.calls)


async def test_items_can_be_referred_to_by_id(tokenizer):
    face = Face(tokenizer, "one", "two")
    first = await face.ask(PATH, input="q")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    again = [{"role": "user", "content": "q"}, reference, {"role": "user", "content": "r"}]
    await face.ask(PATH, input=again)
    assert chained(face.calls)


async def test_instructions_hold_for_one_request_only(tokenizer):
    face = Face(tokenizer, "one", "two")
    first = await face.ask(PATH, input="q", instructions="SECRET")
    await face.ask(PATH, input="r", previous_response_id=first["id"])
    prompt = tokenizer.decode(face.calls[1].prompt_ids)
    assert "SECRET" not in prompt
    assert "one" in prompt


async def test_stored_answers_can_be_read_and_deleted(tokenizer):
    face = Face(tokenizer, "one")
    answer = await face.ask(PATH, input="q")
    path = f"/v1{PATH}/{answer['id']}"
    assert (await face.client.get(path)).json() == answer
    assert (await face.client.delete(path)).json()["deleted"] is True
    assert (await face.client.get(path)).status_code == 404


async def test_an_answer_that_is_not_stored_cannot_be_referred_to(tokenizer):
    face = Face(tokenizer, "one")
    answer = await face.ask(PATH, input="q", store=False)
    refused = await face.post(PATH, input="r", previous_response_id=answer["id"])
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "previous_response_not_found"


async def test_a_streamed_answer_can_be_referred_to(tokenizer):
    face = Face(tokenizer, "one", "two")
    events = await face.events(PATH, input="q")
    await face.ask(PATH, input="r", previous_response_id=events[-1]["response"]["id"])
    assert chained(face.calls)


async def test_a_stream_has_the_protocol_s_sequence_of_events(tokenizer):
    face = Face(tokenizer, f"<think>hm</think>see {CALL}")
    events = await face.events(PATH, input="q", tools=TOOLS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    once = [e["type"] for e in events if not e["type"].endswith(".delta")]
    part = ["response.content_part.added", "response.content_part.done"]
    item = ["response.output_item.added", "response.output_item.done"]
    assert once == [
        "response.created",
        "response.in_progress",
        *(item[0], part[0], "response.reasoning_text.done", part[1], item[1]),
        *(item[0], part[0], "response.output_text.done", part[1], item[1]),
        *(item[0], "response.function_call_arguments.done", item[1]),
        "response.completed",
    ]
    done = [e["item"] for e in events if e["type"] == item[1]]
    assert done == events[-1]["response"]["output"]


async def test_an_answer_that_is_cut_is_incomplete_and_says_why(tokenizer):
    face = Face(tokenizer, [9] * 9, [9] * 9)
    answer = await face.ask(PATH, input="q", max_output_tokens=3)
    streamed = await face.events(PATH, input="q", max_output_tokens=3)
    assert streamed[-1]["type"] == "response.incomplete"
    for one in (answer, streamed[-1]["response"]):
        assert one["status"] == "incomplete"
        assert one["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"input": "q", "background": True}, "background"),
        ({"input": "q", "conversation": "c"}, "conversation"),
        ({"input": "q", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "q", "tool_choice": "required"}, "tool_choice"),
        ({"input": "q", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "q", "store": "yes"}, "store"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_the_parameter_s_name(tokenizer, body, param):
    response = await Face(tokenizer).post(PATH, **body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
