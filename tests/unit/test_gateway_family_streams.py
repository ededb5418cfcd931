"""What is streamed of the answers of every model family."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dialogue import ADD, QUESTION, RESULT, TOOLS, answers, follow_up, prompt_of, streamed
from families import FAMILIES
from fulmen.gateway.render import Answer
from gateways import Face

pytestmark = pytest.mark.usefixtures("harmony")


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return FAMILIES[request.param]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), tools=st.booleans())
def test_a_stream_gives_the_answer_and_nothing_of_its_calls(name, data, tools):
    family, tools = FAMILIES[name], TOOLS if tools else None
    ids = family.ids(family.spell(data.draw(answers(family))))
    check(family, prompt_of(family, tools), ids, tools)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), tools=st.booleans(), thinking=st.booleans())
def test_whatever_is_sampled_a_stream_never_takes_back_what_it_gave(name, data, tools, thinking):
    family, tools = FAMILIES[name], TOOLS if tools else None
    piece = st.sampled_from(
        [
            *family.markers,
            *('{"name": "add", "parameters": {}}', "{", " \n", "hello", "☃", "</think>", "<think>"),
            *("<thi", "analysis", "final", "commentary to=functions.add ", "commentary"),
        ]
    )
    text = "".join(data.draw(st.lists(piece, max_size=9)))
    noise = st.lists(st.integers(3, 258), max_size=4)
    ids = (*data.draw(noise), *family.ids(text), *data.draw(noise))
    stops = [place for place, token in enumerate(ids) if token in family.renderer.stop_ids]
    options = (
        {}
        if thinking or not family.thinks or family.name == "gpt-oss"
        else {"enable_thinking": False}
    )
    ids = ids[: stops[0] + 1] if stops else ids
    check(family, prompt_of(family, tools, **options), ids, tools)


def check(family, prompt, ids, tools):
    answer = family.renderer.parse(prompt, ids, tools)
    whole = {"content": answer.content, "reasoning_content": answer.reasoning or ""}
    for got in streamed(family, prompt, ids, tools)[-1:]:
        for field, text in got.items():
            assert whole[field].startswith(text), (field, got, answer)


def test_text_is_streamed_token_by_token(family):
    answer = Answer("hello, the result is 4: {four}", "so and so" if family.thinks else None)
    ids = family.ids(family.spell(answer))
    after = streamed(family, prompt_of(family), ids)
    assert after[-2] == {"content": answer.content, "reasoning_content": answer.reasoning or ""}
    fields = ["content", "reasoning_content"] if family.thinks else ["content"]
    for field in fields:
        grown = sum(a[field] != b[field] for a, b in pairwise(after))
        assert grown > len(getattr(answer, field.removesuffix("_content"), answer.content)) / 4


def test_a_brace_is_held_back_only_where_it_may_be_a_call():
    family = FAMILIES["llama3"]  # elsewhere calls have a mark of their own
    ids = family.ids("{one}")
    assert streamed(family, prompt_of(family), ids)[-1]["content"] == ""
    assert streamed(family, prompt_of(family, None), ids, None)[-1]["content"] == "{one}"
    ids = family.ids("see {one}")
    assert streamed(family, prompt_of(family), ids)[-1]["content"] == "see {one}"


async def test_a_familys_streamed_turns_are_those_of_whole_answers(family):
    first = Answer("", "hm" if family.thinks else None, (ADD,) if family.calls else ())
    first = first if family.calls else Answer("look")
    replies = [list(family.ids(family.spell(a))) for a in (first, first, Answer("4"))]
    face = Face(family.tokenizer, *replies, renderer=family.renderer)
    ask = {"messages": [QUESTION], "tools": TOOLS}
    events = await face.events("/chat/completions", **ask)
    deltas = [event["choices"][0]["delta"] for event in events if event != "[DONE]"]
    whole = (await face.ask("/chat/completions", **ask))["choices"][0]["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(d.get(name) or "" for d in deltas) == (whole.get(name) or "")
    functions = [c["function"] for d in deltas for c in d.get("tool_calls") or []]
    assert functions == [c["function"] for c in whole.get("tool_calls") or []]
    assert len(functions) == len(first.tool_calls)
    behind = [{**RESULT, "tool_call_id": c["id"]} for c in whole.get("tool_calls") or []]
    await face.ask(
        "/chat/completions", messages=[QUESTION, whole, *(behind or [follow_up()])], tools=TOOLS
    )
    assert face.calls[2].parent == face.calls[1].id


def test_thinking_that_glm_was_told_to_leave_out_is_text():
    family = FAMILIES["glm4.5"]
    ids = family.ids("<think>!")
    check(family, prompt_of(family, enable_thinking=False), ids, TOOLS)


def test_what_gpt_oss_says_in_several_messages_is_one_text():
    family, final = FAMILIES["gpt-oss"], "<|end|><|start|>assistant<|channel|>final<|message|>"
    half = family.ids("☃")[:1]
    for middle in (family.ids("I look "), half):
        ids = family.ids(final) + middle + family.ids(final + "and see")
        check(family, prompt_of(family), ids, TOOLS)
        assert streamed(family, prompt_of(family), ids)[-1]["content"].endswith("and see")
