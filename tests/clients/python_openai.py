"""OpenAI's client for Python. Run under each major version that is in use."""

import asyncio
import json
from typing import Any

import openai
import pytest

USER: list[Any] = [{"role": "user", "content": "say hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
NAMES = ("add", "multiply")
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
FLAT_TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name in NAMES
]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(seat):
    with openai.OpenAI(base_url=seat.base_url, api_key=seat.key, max_retries=0) as made:
        yield made


def chat(client, messages=USER, **more) -> Any:
    return client.chat.completions.create(model="m", messages=messages, **more)


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["m", "slow", "random"]
    assert client.models.retrieve("m").id == "m"


def test_a_chat_answer_is_what_was_recorded(client, seat):
    answer = chat(client)
    assert answer.choices[0].message.content == seat.hello
    assert answer.choices[0].finish_reason == "stop"
    (call,) = seat.calls()
    assert answer.id == call["id"]
    assert answer.usage.completion_tokens == len(call["completion_ids"])
    assert answer.usage.prompt_tokens == len(call["prompt_ids"])
    seat.recorded(seat.hello)


def test_a_streamed_chat_answer_is_what_was_recorded(client, seat):
    stream = chat(client, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == seat.hello
    assert chunks[-1].usage.completion_tokens == len(seat.calls()[0]["completion_ids"])
    seat.recorded(seat.hello)


def test_the_client_puts_a_streamed_chat_answer_together(client, seat):
    with client.chat.completions.stream(model="m", messages=USER) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert whole.choices[0].message.content == seat.hello
    seat.recorded(seat.hello)


def test_the_client_puts_streamed_calls_together(client):
    with client.chat.completions.stream(
        model="m", messages=user("call both"), tools=TOOLS
    ) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        whole = stream.get_final_completion()
    assert [event.name for event in done] == ["add", "multiply"]
    message = whole.choices[0].message
    assert message.content == "I add and multiply."
    assert [call.function.name for call in message.tool_calls] == ["add", "multiply"]


@pytest.mark.parametrize(("text", "count"), [("call add", 1), ("call both", 2)])
def test_a_chat_with_tools_continues_the_sampled_tokens(client, seat, text, count):
    messages = user(text)
    message = chat(client, messages, tools=TOOLS).choices[0].message
    assert len(message.tool_calls) == count
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == (
        [{"a": 2, "b": 3}] * count
    )
    messages.append(message)
    for place, call in enumerate(message.tool_calls):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"result {place}"})
    answer = chat(client, messages, tools=TOOLS)
    results = ", ".join(f"result {place}" for place in range(count))
    assert answer.choices[0].message.content == f"I see: {results}."
    messages += [answer.choices[0].message, *user("say hello")]
    assert chat(client, messages, tools=TOOLS).choices[0].message.content == seat.hello
    seat.continued(3)


def test_a_streamed_chat_with_tools_continues_the_sampled_tokens(client, seat):
    messages = user("call both")
    with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "6"} for call in message.tool_calls
    ]
    messages += [message.to_dict(), *results]
    with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "I see: 6, 6."
    seat.continued(2)


def test_several_choices_are_recorded_one_by_one(client, seat):
    answer = chat(client, n=3)
    assert [choice.message.content for choice in answer.choices] == [seat.hello] * 3
    assert [call["choice"] for call in seat.calls(3)] == [0, 1, 2]


def test_several_streamed_choices_are_told_apart(client, seat):
    texts = ["", ""]
    for chunk in chat(client, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [seat.hello] * 2


def test_reasoning_comes_beside_the_content_and_may_go_back(client, seat):
    messages = user("think")
    message = chat(client, messages).choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
    messages += [message, *user("say hello")]
    chat(client, messages)
    seat.reasoning_was_dropped()


def test_streamed_reasoning_comes_beside_the_content(client):
    chunks = list(chat(client, user("think"), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Two and two."
    assert "".join(delta.content or "" for delta in deltas) == "Four."


def test_log_probabilities_are_those_of_the_sampled_tokens(client, seat):
    answer = chat(client, logprobs=True, top_logprobs=1)
    content = answer.choices[0].logprobs.content
    assert len(content) == len(seat.calls()[0]["completion_ids"])
    assert content[0].logprob == -0.5


def test_a_stop_string_ends_the_text(client):
    answer = chat(client, stop=["wörld"])
    assert answer.choices[0].message.content == "Hello,"
    assert answer.choices[0].finish_reason == "stop"


def test_a_limit_cuts_the_answer(client):
    assert chat(client, max_completion_tokens=3).choices[0].finish_reason == "length"


def test_a_raw_answer_has_a_request_id(client, seat):
    answer = client.chat.completions.with_raw_response.create(model="m", messages=USER)
    assert answer.parse().choices[0].message.content == seat.hello
    assert answer.headers["x-request-id"] == seat.calls()[0]["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_of_the_wrong_type_is_a_bad_request(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature="hot", stream=stream)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_a_wrong_key_is_an_authentication_error(seat):
    client = openai.OpenAI(base_url=seat.base_url, api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        chat(client)
    assert caught.value.code == "invalid_api_key"


def test_a_prompt_that_is_too_long_is_told_by_its_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, user("long " * 5000))
    assert caught.value.code == "context_length_exceeded"


def test_the_key_may_be_in_the_base_url(seat):
    url = f"{seat.root}/key/{seat.key}/v1"
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    assert chat(client).choices[0].message.content == seat.hello
    seat.recorded(seat.hello)


def test_a_stream_that_is_closed_in_the_middle_ends_the_call(client, seat):
    stream = client.chat.completions.create(model="slow", messages=USER, stream=True)
    assert any(chunk.choices[0].delta.content for chunk in stream)
    stream.close()
    assert seat.calls()[0]["finish_reason"] == "abort"
    assert chat(client).choices[0].message.content == seat.hello


def test_a_call_that_times_out_is_recorded_and_superseded(seat):
    client = openai.OpenAI(base_url=seat.base_url, api_key=seat.key, max_retries=0)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="slow", messages=USER)
    (call,) = seat.calls()
    assert (call["finish_reason"], call["superseded"]) == ("abort", True)
    assert chat(client).choices[0].message.content == seat.hello


def test_many_calls_at_once_are_all_served(seat):
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=seat.base_url, api_key=seat.key) as client:
            return await asyncio.gather(*(chat(client, user(f"say hello {n}")) for n in range(16)))

    answers = asyncio.run(ask_all())
    assert [answer.choices[0].message.content for answer in answers] == [seat.hello] * 16
    assert {answer.id for answer in answers} == {call["id"] for call in seat.calls(16)}


def test_an_async_stream_that_is_left_ends_the_call(seat):
    async def leave():
        async with openai.AsyncOpenAI(base_url=seat.base_url, api_key=seat.key) as client:
            stream = await client.chat.completions.create(model="slow", messages=USER, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()

    asyncio.run(leave())
    assert seat.calls()[0]["finish_reason"] == "abort"


# Completions


def test_a_completion_continues_raw_text(client, seat):
    answer = client.completions.create(model="m", prompt="say hello", max_tokens=100)
    assert answer.choices[0].text == seat.hello
    assert seat.calls()[0]["prompt"] == "say hello"


def test_a_streamed_completion_is_the_same(client, seat):
    chunks = client.completions.create(model="m", prompt="say hello", max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == seat.hello


def test_completions_take_several_prompts_and_choices(client, seat):
    answer = client.completions.create(
        model="m", prompt=["say hello", "json"], n=2, max_tokens=100, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[:2]] == [seat.hello] * 2
    assert answer.choices[0].logprobs.token_logprobs[0] == -0.5


# Responses


def respond(client, given: Any = "say hello", **more) -> Any:
    return client.responses.create(model="m", input=given, **more)


def results_of(answer) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": item.name}
        for item in answer.output
        if item.type == "function_call"
    ]


def test_a_response_is_what_was_recorded(client, seat):
    answer = respond(client)
    assert answer.output_text == seat.hello
    assert answer.status == "completed"
    assert answer.usage.output_tokens == len(seat.calls()[0]["completion_ids"])
    seat.recorded(seat.hello)


def test_a_streamed_response_is_what_was_recorded(client, seat):
    with client.responses.stream(model="m", input="say hello") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        whole = stream.get_final_response()
    assert text == whole.output_text == seat.hello
    seat.recorded(seat.hello)


def test_a_plain_stream_of_a_response_ends_with_the_response(client, seat):
    events = list(respond(client, stream=True))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == seat.hello


@pytest.mark.parametrize(("text", "count"), [("call add", 1), ("call both", 2)])
def test_responses_by_reference_continue_the_sampled_tokens(client, seat, text, count):
    first = respond(client, text, tools=FLAT_TOOLS)
    results = results_of(first)
    assert len(results) == count
    second = respond(client, results, tools=FLAT_TOOLS, previous_response_id=first.id)
    assert second.output_text == f"I see: {', '.join(NAMES[:count])}."
    third = respond(client, tools=FLAT_TOOLS, previous_response_id=second.id)
    assert third.output_text == seat.hello
    seat.continued(3)


def test_responses_by_value_continue_the_sampled_tokens(client, seat):
    items = user("call both")
    first = respond(client, items, tools=FLAT_TOOLS, store=False)
    items += [*first.output, *results_of(first)]
    second = respond(client, items, tools=FLAT_TOOLS, store=False)
    items += [*second.output, *user("say hello")]
    assert respond(client, items, tools=FLAT_TOOLS, store=False).output_text == seat.hello
    seat.continued(3)


def test_streamed_responses_with_tools_continue_the_sampled_tokens(client, seat):
    with client.responses.stream(model="m", input="call both", tools=FLAT_TOOLS) as stream:
        done = [e for e in stream if e.type == "response.function_call_arguments.done"]
        first = stream.get_final_response()
    assert [json.loads(event.arguments) for event in done] == [{"a": 2, "b": 3}] * 2
    with client.responses.stream(
        model="m", input=results_of(first), tools=FLAT_TOOLS, previous_response_id=first.id
    ) as stream:
        assert stream.get_final_response().output_text == "I see: add, multiply."
    seat.continued(2)


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_is_an_item_of_its_own(client, seat, streamed):
    if streamed:
        with client.responses.stream(model="m", input="think") as stream:
            text = "".join(e.delta for e in stream if e.type == "response.reasoning_text.delta")
            answer = stream.get_final_response()
        assert text == "Two and two."
    else:
        answer = respond(client, "think")
    thought, said = answer.output
    assert thought.content[0].text == "Two and two."
    assert said.content[0].text == "Four."
    items = [*user("think"), thought, said, *user("say hello")]
    respond(client, items)
    seat.reasoning_was_dropped()


def test_reasoning_before_a_call_goes_back_with_it(client, seat):
    items = user("think and call")
    first = respond(client, items, tools=FLAT_TOOLS)
    items += [*first.output, *results_of(first)]
    assert respond(client, items, tools=FLAT_TOOLS).output_text == "I see: add."
    seat.continued(2)


def test_stored_responses_can_be_read_and_deleted(client):
    answer = respond(client)
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_an_unknown_previous_response_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, previous_response_id="resp_unknown")
    assert caught.value.code == "previous_response_not_found"


def test_a_response_to_an_input_of_the_wrong_type_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, 3)
    assert caught.value.param == "input"


def test_a_response_to_a_prompt_that_is_too_long_is_told_by_its_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, "long " * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_a_response_that_is_cut_is_incomplete(client):
    answer = respond(client, max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_stream_of_a_response_that_is_left_ends_the_call(client, seat):
    stream = client.responses.create(model="slow", input="say hello", stream=True)
    assert any(event.type == "response.output_text.delta" for event in stream)
    stream.close()
    assert seat.calls()[0]["finish_reason"] == "abort"
    assert respond(client).output_text == seat.hello
