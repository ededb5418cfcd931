"""LiteLLM, which speaks each of the protocols and has its own idea of errors."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up of prices elsewhere

import litellm  # pyright: ignore[reportMissingImports] - it has its own environment

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
NAMES = ("add", "multiply")
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
]
CHATS = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
"""How LiteLLM calls the protocols: chat completions twice, and messages."""


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def ask(seat):
    """LiteLLM's `completion`, or another function like it, at the gateway."""

    def asking(
        provider: str,
        messages: Any = None,
        model: str = "m",
        call: Callable[..., Any] = litellm.completion,
        **more: Any,
    ) -> Any:
        given = {
            "api_base": seat.root if provider == "anthropic" else seat.base_url,
            "api_key": seat.key,
            "max_retries": 0,
            "max_tokens": 500,
            **more,
        }
        return call(f"{provider}/{model}", messages or user("say hello"), **given)

    return asking


@CHATS
def test_an_answer_is_what_was_recorded(ask, seat, provider):
    answer = ask(provider)
    assert answer.choices[0].message.content == seat.hello
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(seat.calls()[0]["completion_ids"])
    seat.recorded(seat.hello)


@CHATS
def test_a_streamed_answer_is_what_was_recorded(ask, seat, provider):
    chunks = list(ask(provider, stream=True))
    whole = litellm.stream_chunk_builder(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == seat.hello
    assert whole.choices[0].message.content == seat.hello
    seat.recorded(seat.hello)


@CHATS
@pytest.mark.parametrize(("text", "count"), [("call add", 1), ("call both", 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_continues_the_sampled_tokens(
    ask, seat, provider, text, count, stream
):
    def turn(messages: Any) -> Any:
        answer = ask(provider, messages, tools=TOOLS, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0]

    messages = user(text)
    choice = turn(messages)
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == list(NAMES[:count])
    messages.append(choice.message)
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": call.function.name} for call in calls
    ]
    choice = turn(messages)
    assert choice.message.content == f"I see: {', '.join(NAMES[:count])}."
    messages += [choice.message, *user("say hello")]
    assert turn(messages).message.content == seat.hello
    seat.continued(3)


@CHATS
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_beside_the_content(ask, seat, provider, stream):
    messages = user("think")
    answer = ask(provider, messages, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
    messages += [message, *user("say hello")]
    ask(provider, messages)
    seat.reasoning_was_dropped()


def test_several_choices_are_told_apart(ask, seat):
    answer = ask("openai", n=2)
    assert [choice.message.content for choice in answer.choices] == [seat.hello] * 2


@CHATS
def test_a_field_of_the_wrong_type_is_a_bad_request(ask, provider):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(provider, temperature="hot")


@CHATS
def test_a_wrong_key_is_an_authentication_error(ask, provider):
    with pytest.raises(litellm.AuthenticationError):
        ask(provider, api_key="sk-wrong")


@CHATS
def test_a_prompt_that_is_too_long_is_recognised(ask, provider):
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(provider, user("long " * 5000))


@CHATS
def test_a_stream_that_is_left_in_the_middle_ends_the_call(ask, seat, provider):
    async def leave():
        stream = await ask(provider, model="slow", stream=True, call=litellm.acompletion)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.aclose()

    asyncio.run(leave())
    assert seat.calls()[0]["finish_reason"] == "abort"
    assert ask(provider).choices[0].message.content == seat.hello


def test_a_completion_continues_raw_text(seat):
    answer = litellm.text_completion(
        model="text-completion-openai/m",
        prompt="say hello",
        api_base=seat.base_url,
        api_key=seat.key,
        max_tokens=100,
    )
    assert answer.choices[0].text == seat.hello
    assert seat.calls()[0]["prompt"] == "say hello"


def respond(seat, given: Any, **more: Any) -> Any:
    where = {"api_base": seat.base_url, "api_key": seat.key}
    return litellm.responses(model="openai/m", input=given, **where, **more)


def test_a_response_is_what_was_recorded(seat):
    answer = respond(seat, "say hello")
    assert answer.output[0].content[0].text == seat.hello
    seat.recorded(seat.hello)


def test_a_streamed_response_is_what_was_recorded(seat):
    events = list(respond(seat, "say hello", stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == seat.hello
    assert events[-1].type == "response.completed"
    seat.recorded(seat.hello)


def test_responses_by_reference_continue_the_sampled_tokens(seat):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    first = respond(seat, "call both", tools=tools)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": item.name}
        for item in first.output
        if item.type == "function_call"
    ]
    second = respond(seat, results, tools=tools, previous_response_id=first.id)
    assert second.output[0].content[0].text == "I see: add, multiply."
    seat.continued(2)
