"""Anthropic's messages: blocks in, blocks out."""

import json
from typing import Any

import pytest

from gateways import Face

PATH = "/messages"
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "q"}]


async def test_an_answer_is_a_block_of_text(tokenizer):
    face = Face(tokenizer, "hello")
    answer = await face.ask(PATH, messages=QUESTION, max_tokens=9, system="Be brief.")
    assert answer["content"] == [{"type": "text", "text": "hello"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    (call,) = face.calls
    assert (call.id, call.protocol, call.request["system"]) == (
        answer["id"],
        "messages",
        "Be brief.",
    )
    assert "Be brief." in tokenizer.decode(call.prompt_ids)
    assert answer["usage"]["input_tokens"] == len(call.prompt_ids)
    assert answer["usage"]["output_tokens"] == len(call.completion_ids)


async def test_reasoning_and_calls_are_blocks_of_their_own(tokenizer):
    face = Face(tokenizer, f"<think>\nhm\n</think>\n\nlet me see\n{CALL}\n{CALL}")
    answer = await face.ask(PATH, messages=QUESTION, max_tokens=99, tools=TOOLS)
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][2]["input"] == {"a": 1}
    assert answer["content"][2]["id"] != answer["content"][3]["id"]
    assert answer["stop_reason"] == "tool_use"


async def test_a_conversation_with_tool_results_continues_the_sampled_tokens(tokenizer):
    face = Face(tokenizer, CALL, "1 it is", "bye")
    talk: list[Any] = list(QUESTION)
    for say in ("", "thanks"):
        answer = await face.ask(PATH, messages=talk, max_tokens=99, tools=TOOLS)
        talk.append({"role": "assistant", "content": answer["content"]})
        uses = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": "1"} for use in uses
        ]
        words = [{"type": "text", "text": say}] if say else []
        talk.append({"role": "user", "content": results + words})
    await face.ask(PATH, messages=talk, max_tokens=99, tools=TOOLS)
    one, two, three = face.calls
    assert (one.parent, two.parent, three.parent) == (None, one.id, two.id)
    for before, after in ((one, two), (two, three)):
        whole = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(whole)] == whole


async def test_a_tool_that_failed_without_a_word_does_not_look_like_one_that_returned_nothing(
    tokenizer,
):
    face = Face(tokenizer, "oh")
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True}
    talk = [
        *QUESTION,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    await face.ask(PATH, messages=talk, max_tokens=9, tools=TOOLS)
    assert "error" in tokenizer.decode(face.engine.requests[0].prompt_ids).split("</tool_call>")[-1]


async def test_a_stop_sequence_is_named(tokenizer):
    face = Face(tokenizer, "one STOP two")
    answer = await face.ask(PATH, messages=QUESTION, max_tokens=99, stop_sequences=["STOP"])
    assert (answer["content"][0]["text"], answer["stop_sequence"]) == ("one", "STOP")
    assert answer["stop_reason"] == "stop_sequence"


async def test_the_limit_on_tokens_is_told_as_such(tokenizer):
    answer = await Face(tokenizer, [9] * 9).ask(PATH, messages=QUESTION, max_tokens=3)
    assert answer["stop_reason"] == "max_tokens"


async def test_a_stream_has_the_protocol_s_sequence_of_events(tokenizer):
    face = Face(tokenizer, f"<think>hm</think>see {CALL}")
    events = await face.events(PATH, messages=QUESTION, max_tokens=99, tools=TOOLS)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    starts = [e["index"] for e in events if e["type"] == "content_block_start"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2]
    parts = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    given = "".join(p["partial_json"] for p in parts if p["type"] == "input_json_delta")
    assert json.loads(given) == {"a": 1}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_tokens_are_counted_without_asking_the_policy(tokenizer):
    face = Face(tokenizer, "x")
    asked = {"messages": QUESTION, "tools": TOOLS, "system": "s"}
    counted = await face.ask(f"{PATH}/count_tokens", **asked)
    assert face.engine.requests == []
    answer = await face.ask(PATH, max_tokens=5, **asked)
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "messages": []}, "messages"),
        ({"max_tokens": 5, "messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"max_tokens": 5, "messages": [*QUESTION, {"role": "assistant", "content": "I"}]}, "last"),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0: image",
        ),
        ({"max_tokens": 5, "top_k": 3}, "top_k"),
        ({"max_tokens": 5, "tools": [{"type": "web_search_20250305"}]}, "tools.0"),
        ({"max_tokens": 5, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 5, "temperature": 1.5}, "temperature"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_anthropic_s_form(tokenizer, body, words):
    response = await Face(tokenizer).post(PATH, **{"messages": QUESTION, **body})
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


async def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(tokenizer):
    face = Face(tokenizer, max_context=3)
    response = await face.post(PATH, messages=QUESTION, max_tokens=5)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt is too long")


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [(PATH, 401, "authentication_error"), ("/messages/x", 404, "not_found_error")],
)
async def test_errors_of_the_server_have_anthropic_s_form_too(tokenizer, path, status, kind):
    face = Face(tokenizer)
    response = await face.client.post(f"/v1{path}", headers={"authorization": ""}, json={})
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


async def test_a_client_that_leaves_the_conversation_to_the_server_is_told_to_send_it(tokenizer):
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    face = Face(tokenizer)
    response = await face.post(PATH, messages=QUESTION, max_tokens=5, thread=thread)
    assert response.status_code == 400
    details = response.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request"}


async def test_words_that_litellm_puts_for_an_empty_text_are_not_the_policy_s(tokenizer):
    face = Face(tokenizer, CALL, "1 it is")
    answer = await face.ask(PATH, messages=QUESTION, max_tokens=99, tools=TOOLS)
    (use,) = answer["content"]
    filler = "[System: Empty message content sanitised to satisfy protocol]"
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "1"}
    talk = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "text", "text": filler}, use]},
        {"role": "user", "content": [result]},
    ]
    await face.ask(PATH, messages=talk, max_tokens=99, tools=TOOLS)
    first, second = face.calls
    assert (second.parent, second.drift) == (first.id, None)


async def test_a_wrong_key_is_told_in_the_words_that_clients_look_for(tokenizer):
    face = Face(tokenizer)
    for key in ("sk-other", "fulmen-forged"):
        headers = {"authorization": f"Bearer {key}"}
        response = await face.client.post("/v1/chat/completions", headers=headers, json={})
        message = response.json()["error"]["message"]
        assert message.startswith("Incorrect API key provided: ")
