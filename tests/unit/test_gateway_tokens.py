"""Rendering's own tokenizer says what the whole one says; continued prompts say what was meant."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.gateway.tokens import LeanTokenizer
from gateways import Face

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXTS = st.text(max_size=300) | st.lists(
    st.sampled_from(["<|im_start|>", "<think>", " hello", "\n", "☃"]), max_size=8
).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, ids=st.lists(st.integers(0, 480), max_size=12))
def test_texts_and_tokens_are_those_of_the_whole_tokenizer(tokenizer, text, ids):
    lean = LeanTokenizer(tokenizer)
    assert lean.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    for skip in (False, True):
        assert lean.decode(ids, skip_special_tokens=skip) == tokenizer.decode(
            ids, skip_special_tokens=skip
        )


def test_what_is_encoded_twice_is_not_shared(tokenizer):
    lean = LeanTokenizer(tokenizer)
    lean.encode("hello").append(7)
    assert lean.encode("hello") == tokenizer.encode("hello", add_special_tokens=False)


def test_the_rest_is_the_whole_tokenizer_s_but_no_offsets_are_offered(tokenizer):
    lean = LeanTokenizer(tokenizer)
    assert lean.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(AttributeError):
        lean.__getattr__("__call__")


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(["hello", "a\n\nb", "☃ 12", "{", CALL, f"first\n{CALL}"]),
            st.sampled_from(["and?", "so ☃", "x\ny"]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_continued_prompt_is_the_one_that_a_fresh_rendering_gives(tokenizer, renderer, turns):
    """Where nothing was spelled oddly, going on from the served tokens changes nothing."""

    async def talk():
        face = Face(tokenizer, *[answer for answer, _ in turns], "end")
        messages = [{"role": "user", "content": "q"}]
        for _, question in turns:
            body = await face.ask("/chat/completions", messages=messages, tools=TOOLS)
            message = body["choices"][0]["message"]
            messages.append(message)
            for call in message.get("tool_calls") or []:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": question})
            if not message.get("tool_calls"):
                messages.append({"role": "user", "content": question})
        await face.ask("/chat/completions", messages=messages, tools=TOOLS)
        last = face.calls[-1]
        assert last.parent == face.calls[-2].id
        assert last.prompt_ids == renderer.render(messages, TOOLS, {})

    asyncio.run(talk())
