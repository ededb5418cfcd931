"""Every model family that the gateway speaks: rendered and read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import families
from dialogue import (
    ADD,
    LOOK,
    QUESTION,
    RESULT,
    TOOLS,
    Talk,
    answers,
    having,
    meaning,
    prompt_of,
    read,
    said,
    streamed,
)
from families import FAMILIES
from fulmen.gateway.render import Answer, ToolCall, make_renderer
from fulmen.schema.errors import ModelError

pytestmark = pytest.mark.usefixtures("harmony")


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return FAMILIES[request.param]


def test_a_prompt_holds_the_question_and_ends_where_the_model_must_speak(family):
    text = family.renderer.spell(prompt_of(family))
    assert "2 and 2?" in text
    assert text.endswith(family.asks)


@having(lambda f: f.calls)
def test_a_tool_call_comes_back_with_its_name_and_arguments(family):
    answer = Answer("", tool_calls=(ADD,))
    assert meaning(read(family, answer)) == meaning(answer)


@having(lambda f: f.calls > 1)
def test_parallel_calls_come_back_in_order(family):
    answer = Answer("I look.", tool_calls=(ADD, LOOK, ADD))
    assert meaning(read(family, answer)) == meaning(answer)


@having(lambda f: f.calls and f.says_and_calls)
def test_text_before_a_call_stays_text(family):
    answer = Answer("I look.", tool_calls=(LOOK,))
    assert meaning(read(family, answer)) == meaning(answer)


@having(lambda f: f.calls and f.name != "gpt-oss")
def test_a_history_is_rendered_as_the_models_of_the_family_write(family):
    answer = Answer("I look." if family.says_and_calls else "", tool_calls=(LOOK,))
    prompt = prompt_of(family)
    result = {"role": "tool", "tool_call_id": "c0", "content": "4"}
    whole = family.renderer.render([QUESTION, said(answer), result], TOOLS, {})
    assert whole[: len(prompt)] == prompt
    assert family.renderer.spell(whole[len(prompt) :]).startswith(family.spell(answer))


@having(lambda f: f.thinks)
def test_reasoning_is_told_from_text(family):
    answer = Answer("four", "two and two", (ADD,))
    assert meaning(read(family, answer)) == meaning(answer)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_a_family_writes_is_read_as_it_was_meant(name, data):
    family = FAMILIES[name]
    answer = data.draw(answers(family))
    assert meaning(read(family, answer)) == meaning(answer)


def test_gpt_oss_is_told_whose_result_it_reads():
    talk = Talk(FAMILIES["gpt-oss"])
    talk.ask()
    talk.answer(Answer("", None, (ADD,)))
    got = talk.ask(RESULT)
    assert "<|start|>functions.add to=assistant" in talk.family.renderer.spell(got.ids)


def test_gpt_oss_without_its_vocabulary_says_where_it_is_looked_for(monkeypatch):
    def fail(_):
        raise RuntimeError("no network")

    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", fail)
    with pytest.raises(ModelError, match=r"no network.*TIKTOKEN_ENCODINGS_BASE"):
        make_renderer(families.tokenizer("gpt-oss"), "gpt_oss")


def test_llama_may_announce_a_call_by_its_token():
    family = FAMILIES["llama3"]
    ids = family.ids("<|python_tag|>" + family.spell(Answer("", None, (ADD,))))
    answer = family.renderer.parse(prompt_of(family), ids, TOOLS)
    assert meaning(answer) == meaning(Answer("", None, (ADD,)))
    assert streamed(family, prompt_of(family), ids)[-1]["content"] == ""


def test_glm_answers_without_reasoning_where_the_prompt_has_closed_it():
    family = FAMILIES["glm4.5"]
    prompt, ids = prompt_of(family, enable_thinking=False), family.ids("\nfour<|user|>")
    assert family.renderer.parse(prompt, ids, TOOLS) == Answer("four")
    assert streamed(family, prompt, ids)[-1]["content"] == "four"


def test_a_string_that_glm_writes_for_a_nullable_argument_is_a_call():
    family = FAMILIES["glm4.5"]
    kind = {"type": "object", "properties": {"b": {"type": ["string", "null"]}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": kind}}]
    answer = Answer("", None, (ToolCall("add", '{"b": "two words"}'),))
    assert meaning(read(family, answer, tools)) == meaning(answer)


def test_a_template_ends_turns_by_its_own_token_too():
    from transformers import PreTrainedTokenizerFast

    ours = families.tokenizer("qwen2.5")
    other = PreTrainedTokenizerFast(tokenizer_object=ours.backend_tokenizer)
    other.eos_token, other.chat_template = "<|endoftext|>", ours.chat_template
    renderer = make_renderer(other, "qwen2")
    assert renderer.stop_ids == {151643, 151645}
    assert renderer.parse((), renderer.encode("four<|im_end|>"), TOOLS) == Answer("four")
