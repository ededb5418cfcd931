"""Answers of a given form, asked for as OpenAI's client for Python does it.

The weights are random: whatever form an answer has, the grammar gave it.
"""

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

USER: list[Any] = [{"role": "user", "content": "paint"}]


class Paint(BaseModel):
    """Pour some paint."""

    colour: Literal["red", "blue"]
    count: int = Field(ge=0, le=99)


@pytest.fixture
def client(seat):
    with openai.OpenAI(base_url=seat.base_url, api_key=seat.key, max_retries=0) as made:
        yield made


def test_chat_parses_into_the_client_s_own_type(client):
    answer = client.chat.completions.parse(model="random", messages=USER, response_format=Paint)
    assert isinstance(answer.choices[0].message.parsed, Paint)


def test_a_streamed_chat_answer_parses_too(client):
    with client.chat.completions.stream(
        model="random", messages=USER, response_format=Paint
    ) as stream:
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Paint)


def test_responses_parse_into_the_client_s_own_type(client):
    answer = client.responses.parse(model="random", input="paint", text_format=Paint)
    assert isinstance(answer.output_parsed, Paint)


def test_a_strict_tool_that_is_required_is_called_with_arguments_of_its_type(client):
    answer = client.chat.completions.parse(
        model="random",
        messages=USER,
        tools=[openai.pydantic_function_tool(Paint)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Paint)


def test_a_schema_that_cannot_be_kept_to_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="cannot be held to its form"):
        client.chat.completions.create(
            model="random",
            messages=USER,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"not": {"type": "string"}}},
            },
        )
