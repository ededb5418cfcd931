"""Anthropic's client for Python."""

import asyncio
from typing import Any

import anthropic  # pyright: ignore[reportMissingImports] - it has its own environment
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
NAMES = ("add", "multiply")
TOOLS: list[Any] = [
    {"name": name, "description": f"{name} two numbers", "input_schema": SCHEMA} for name in NAMES
]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def results_of(message, **more) -> list[Any]:
    blocks = [
        {"type": "tool_result", "tool_use_id": block.id, "content": block.name, **more}
        for block in message.content
        if block.type == "tool_use"
    ]
    return [{"role": "user", "content": blocks}]


@pytest.fixture
def client(seat):
    with anthropic.Anthropic(base_url=seat.root, api_key=seat.key, max_retries=0) as made:
        yield made


def ask(client, messages: Any = None, **more) -> Any:
    given = {"model": "m", "max_tokens": 500, "messages": messages or user("say hello"), **more}
    return client.messages.create(**given)


def streamed(client, messages: Any = None, **more) -> tuple[list[Any], Any]:
    """The events that the client makes of a stream, and its final message."""
    given = {"model": "m", "max_tokens": 500, "messages": messages or user("say hello"), **more}
    with client.messages.stream(**given) as stream:
        return list(stream), stream.get_final_message()


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["m", "slow", "random"]
    assert client.models.retrieve("slow").display_name == "slow"


def test_a_message_is_what_was_recorded(client, seat):
    message = ask(client, system="Be kind.")
    assert message.content[0].text == seat.hello
    assert message.stop_reason == "end_turn"
    (call,) = seat.calls()
    assert message.id == call["id"]
    assert message.usage.output_tokens == len(call["completion_ids"])
    assert "Be kind." in call["prompt"]
    seat.recorded(seat.hello)


def test_a_streamed_message_is_what_was_recorded(client, seat):
    events, message = streamed(client)
    assert "".join(event.text for event in events if event.type == "text") == seat.hello
    assert message.content[0].text == seat.hello
    assert message.usage.output_tokens == len(seat.calls()[0]["completion_ids"])
    seat.recorded(seat.hello)


def test_a_plain_stream_has_the_protocol_s_events(client):
    kinds = [event.type for event in ask(client, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize(("text", "count"), [("call add", 1), ("call both", 2)])
@pytest.mark.parametrize("get", [ask, lambda *args, **more: streamed(*args, **more)[1]])
def test_a_conversation_with_tools_continues_the_sampled_tokens(client, seat, text, count, get):
    messages = user(text)
    message = get(client, messages, tools=TOOLS)
    uses = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert [use.name for use in uses] == list(NAMES[:count])
    assert [use.input for use in uses] == [{"a": 2, "b": 3}] * count
    messages += [{"role": "assistant", "content": message.content}, *results_of(message)]
    message = get(client, messages, tools=TOOLS)
    assert message.content[0].text == f"I see: {', '.join(NAMES[:count])}."
    messages += [{"role": "assistant", "content": message.content}, *user("say hello")]
    assert get(client, messages, tools=TOOLS).content[0].text == seat.hello
    seat.continued(3)


def test_a_failed_tool_s_result_continues_the_sampled_tokens(client, seat):
    messages = user("call add")
    message = ask(client, messages, tools=TOOLS)
    messages += [
        {"role": "assistant", "content": message.content},
        *results_of(message, is_error=True),
    ]
    assert ask(client, messages, tools=TOOLS).content[0].text == "I see: add."
    seat.continued(2)


def test_a_result_in_blocks_with_words_behind_it_is_read(client, seat):
    messages = user("call add")
    message = ask(client, messages, tools=TOOLS)
    results = results_of(message)[0]["content"]
    results[0]["content"] = [{"type": "text", "text": "5"}]
    results.append({"type": "text", "text": "say hello"})
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    assert ask(client, messages, tools=TOOLS).content[0].text == seat.hello
    assert "<tool_response>\n5\n</tool_response>" in seat.continued(2)[1]["prompt"]


def test_the_client_s_tool_runner_goes_through_a_conversation(client, seat):
    @anthropic.beta_tool
    def add(a: float, b: float) -> str:
        """Add two numbers."""
        return f"{a:g} and {b:g}"

    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=500, tools=[add], messages=user("call add")
    )
    assert runner.until_done().content[0].text == "I see: 2 and 3."
    seat.continued(2)


def test_a_thread_that_the_server_should_keep_is_refused_in_its_own_way(client):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.beta.messages.create(
            model="m", max_tokens=9, messages=user("say hello"), thread={"type": "create"}
        )
    assert caught.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"


@pytest.mark.parametrize("get", [ask, lambda *args, **more: streamed(*args, **more)[1]])
def test_reasoning_is_a_block_of_its_own(client, seat, get):
    messages = user("think")
    message = get(client, messages)
    thought, said = message.content
    assert (thought.type, thought.thinking) == ("thinking", "Two and two.")
    assert (said.type, said.text) == ("text", "Four.")
    messages += [{"role": "assistant", "content": message.content}, *user("say hello")]
    get(client, messages)
    seat.reasoning_was_dropped()


def test_streamed_reasoning_comes_as_thinking(client):
    events, _ = streamed(client, user("think"))
    thought = "".join(event.thinking for event in events if event.type == "thinking")
    assert thought == "Two and two."


def test_reasoning_before_a_call_goes_back_with_it(client, seat):
    messages = user("think and call")
    message = ask(client, messages, tools=TOOLS)
    messages += [{"role": "assistant", "content": message.content}, *results_of(message)]
    assert ask(client, messages, tools=TOOLS).content[0].text == "I see: add."
    seat.continued(2)


def test_tokens_are_counted_as_they_are_charged(client):
    given: dict[str, Any] = {"system": "Be kind.", "tools": TOOLS}
    counted = client.messages.count_tokens(model="m", messages=user("say hello"), **given)
    assert counted.input_tokens == ask(client, **given).usage.input_tokens


def test_a_stop_sequence_ends_the_text(client):
    message = ask(client, stop_sequences=["wörld"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "wörld")
    assert message.content[0].text == "Hello,"


def test_a_limit_cuts_the_message(client):
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_of_the_wrong_type_is_a_bad_request(client, stream):
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, extra_body={"temperature": "hot"}, stream=stream)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in str(caught.value)


def test_a_wrong_key_is_an_authentication_error(seat):
    client = anthropic.Anthropic(base_url=seat.root, api_key="sk-wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        ask(client)


def test_the_key_may_be_a_bearer_token_or_in_the_base_url(seat):
    for given in (
        {"base_url": seat.root, "auth_token": seat.key, "api_key": None},
        {"base_url": f"{seat.root}/key/{seat.key}", "api_key": "unused"},
    ):
        with anthropic.Anthropic(**given, max_retries=0) as client:
            assert ask(client).content[0].text == seat.hello


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(client):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, user("long " * 5000))


def test_a_stream_that_is_left_in_the_middle_ends_the_call(client, seat):
    with client.messages.stream(model="slow", max_tokens=500, messages=user("say hello")) as stream:
        assert next(stream.text_stream)
    assert seat.calls()[0]["finish_reason"] == "abort"
    assert ask(client).content[0].text == seat.hello


def test_a_call_that_times_out_is_recorded_and_superseded(client, seat):
    with pytest.raises(anthropic.APITimeoutError):
        ask(client.with_options(timeout=0.3), model="slow")
    (call,) = seat.calls()
    assert (call["finish_reason"], call["superseded"]) == ("abort", True)
    assert ask(client).content[0].text == seat.hello


def test_many_messages_at_once_are_all_served(seat):
    async def ask_all():
        async with anthropic.AsyncAnthropic(base_url=seat.root, api_key=seat.key) as client:
            return await asyncio.gather(*(ask(client, user(f"say hello {n}")) for n in range(16)))

    answers = asyncio.run(ask_all())
    assert [answer.content[0].text for answer in answers] == [seat.hello] * 16
    assert {answer.id for answer in answers} == {call["id"] for call in seat.calls(16)}
