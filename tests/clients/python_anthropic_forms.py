"""Answers of a given form, as Anthropic's client for Python asks for them, of random weights."""

from typing import Any, Literal

import anthropic  # pyright: ignore[reportMissingImports] - it has its own environment
import pytest
from pydantic import BaseModel

USER: list[Any] = [{"role": "user", "content": "paint"}]


class Paint(BaseModel):
    """Pour some paint."""

    colour: Literal["red", "blue"]
    count: Literal[1, 2, 3]


@pytest.fixture
def client(seat):
    with anthropic.Anthropic(base_url=seat.root, api_key=seat.key, max_retries=0) as made:
        yield made


def test_messages_parse_into_the_client_s_own_type(client):
    answer = client.messages.parse(
        model="random", max_tokens=900, messages=USER, output_format=Paint
    )
    assert isinstance(answer.parsed_output, Paint)


def test_a_tool_that_is_chosen_is_called(client):
    schema = Paint.model_json_schema()
    answer = client.messages.create(
        model="random",
        max_tokens=900,
        messages=USER,
        tools=[{"name": "paint", "input_schema": schema, "strict": True}],
        tool_choice={"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
    )
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert Paint.model_validate(use.input)


def test_a_schema_that_cannot_be_kept_to_is_a_bad_request(client):
    form = {"format": {"type": "json_schema", "schema": {"not": {"type": "string"}}}}
    with pytest.raises(anthropic.BadRequestError, match="cannot be held to its form"):
        client.messages.create(model="random", max_tokens=9, messages=USER, output_config=form)
