"""Every model family that the gateway speaks: render, parse, continue, stream."""

import json
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import families
from families import FAMILIES
from fulmen.gateway.completion import TextStream
from fulmen.gateway.conversation import Conversation, Prompt, Served
from fulmen.gateway.render import Answer, ToolCall, make_renderer
from fulmen.schema.errors import ModelError
from gateways import Face

TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {}}}
    for name in ("add", "look_up")
]
QUESTION = {"role": "user", "content": "2 and 2?"}
ADD = ToolCall("add", '{"a": 2, "b": "two words"}')
LOOK = ToolCall("look_up", '{"deep": {"list": [1, null, "x"]}}')


@pytest.fixture(autouse=True)
def harmony(monkeypatch):
    """Gpt-oss without its download."""
    pytest.importorskip("openai_harmony")
    encoding = families.Harmony(families.tokenizer("gpt-oss"))
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda _: encoding)


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return FAMILIES[request.param]


def having(predicate):
    return pytest.mark.parametrize(
        "family", [f for f in FAMILIES.values() if predicate(f)], ids=lambda f: f.name
    )


def said(answer):
    """An answer as the message that a client sends back."""
    message = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": f"c{place}", "type": "function", "function": vars_of(call)}
            for place, call in enumerate(answer.tool_calls)
        ]
    return message


def vars_of(call):
    return {"name": call.name, "arguments": call.arguments}


def prompt_of(family, tools=TOOLS, **options):
    return family.renderer.render([QUESTION], tools, options)


def read(family, answer, tools=TOOLS):
    return family.renderer.parse(prompt_of(family), family.ids(family.spell(answer)), tools)


def meaning(answer):
    """An answer with its arguments as values; unlike Python's, 1 is not true."""
    calls = [
        (c.name, json.dumps(json.loads(c.arguments), sort_keys=True)) for c in answer.tool_calls
    ]
    return answer.content, answer.reasoning, calls


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


# What a format can say --------------------------------------------------------------------------


def words(family):
    """Text that the format can carry: not the spelling of its own structure, which would be
    structure; and without white space at its ends, which formats add and trim."""
    forbidden = {*family.markers, "<think>", "</think>"}
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
        ["two words", '{"a": 1}', "```", "{", "<", "𝄞", "a\n\nb", "}\n", "functions.add", "<|im"]
    )
    joined = st.lists(text, max_size=3).map("".join)
    return joined.filter(lambda t: t == t.strip() and not any(m in t for m in forbidden))


def arguments(family):
    """Any JSON object."""
    text = words(family)
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
    leaves = leaves.filter(lambda v: v not in (float("inf"), float("-inf")))
    if family.name == "glm4.5":
        # GLM's arguments stand without quotes: a string that reads as JSON is that JSON, unless
        # the tool declares a string.
        flat = leaves.filter(lambda v: not isinstance(v, str) or not reads_as_json(v))
    else:
        flat = leaves
    deep = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3)
    )
    return st.dictionaries(text, flat | deep.filter(lambda v: not isinstance(v, str)), max_size=3)


def reads_as_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@st.composite
def answers(draw, family):
    """Any answer that the format can say."""
    content = draw(words(family))
    reasoning = draw(words(family)) if family.thinks else ""
    names = st.sampled_from(["add", "look_up"])
    calls = [
        ToolCall(draw(names), json.dumps(draw(arguments(family)), ensure_ascii=False))
        for _ in range(draw(st.integers(0, min(family.calls, 3))))
    ]
    if calls and not family.says_and_calls:
        content = ""
    if family.name == "llama3" and content.startswith("{"):
        # The format has no mark for a call: such text is one.
        assume(not (reads_as_json(content) and json.loads(content).get("name")))
    return Answer(content, reasoning or None, tuple(calls))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_a_family_writes_is_read_as_it_was_meant(name, data):
    family = FAMILIES[name]
    answer = data.draw(answers(family))
    assert meaning(read(family, answer)) == meaning(answer)


# Streams ----------------------------------------------------------------------------------------


def streamed(family, prompt, ids, tools=TOOLS):
    """What a stream has given of each field after every token."""
    stream = TextStream(family.renderer, (), family.renderer.reading(prompt, tools))
    got, after = {"content": "", "reasoning_content": ""}, []
    for token in ids:
        for name, text in stream.push([token]):
            got[name] += text
        after.append(dict(got))
    return after


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


# Turns ------------------------------------------------------------------------------------------


class Talk:
    """A conversation of a family, turn by turn."""

    def __init__(self, family):
        self.family, self.conversation, self.messages = family, Conversation(), [QUESTION]
        self.prompt, self.number = Prompt(()), 0

    def ask(self, *messages):
        self.messages += messages
        self.prompt = self.conversation.prompt(self.family.renderer, self.messages, TOOLS, {})
        return self.prompt

    def answer(self, answer, ids=None):
        """The model answers as its family does; returns all tokens so far."""
        ids = ids or self.family.ids(self.family.spell(answer))
        self.number += 1
        served = Served(f"call{self.number}", self.prompt.ids, ids)
        message = said(answer)
        self.conversation.add(served, self.messages, message, TOOLS, {})
        self.messages = [*self.messages, message]
        return served.ids


def follow_up(text="and the rest?"):
    return {"role": "user", "content": text}


RESULT = {"role": "tool", "tool_call_id": "c0", "content": "4"}


@having(lambda f: f.calls)
def test_the_tokens_of_a_call_begin_the_prompt_with_its_result(family):
    talk = Talk(family)
    talk.ask()
    before = talk.answer(Answer("", "hm" if family.thinks else None, (ADD,)))
    got = talk.ask(RESULT)
    assert (got.parent, got.drift) == ("call1", None)
    assert got.ids[: len(before)] == before
    assert "4" in family.renderer.spell(got.ids[len(before) :])
    assert family.renderer.spell(got.ids).endswith(
        "" if family.name == "deepseek-v3" else family.asks
    )


def test_the_tokens_of_an_answer_begin_the_prompt_with_a_new_question(family):
    talk = Talk(family)
    talk.ask()
    before = talk.answer(Answer("four"))
    got = talk.ask(follow_up())
    if family.forgets:
        assert (got.parent, got.drift) == (None, "template")
        return
    assert (got.parent, got.drift) == ("call1", None)
    assert got.ids[: len(before)] == before
    assert family.renderer.spell(got.ids).endswith(family.asks)


@having(lambda f: f.thinks)
def test_reasoning_that_a_new_question_drops_is_drift_of_the_template(family):
    talk = Talk(family)
    talk.ask()
    talk.answer(Answer("four", "two and two"))
    got = talk.ask(follow_up())
    assert (got.parent, got.drift) == (None, "template")
    assert "two and two" not in family.renderer.spell(got.ids)


@having(lambda f: f.calls)
def test_the_tokens_stay_through_calls_results_and_answers(family):
    talk = Talk(family)
    talk.ask()
    talk.answer(Answer("", None, (ADD,)))
    for number in (1, 2):
        got = talk.ask(RESULT)
        assert (got.parent, got.drift) == (f"call{number}", None)
        talk.answer(Answer("", None, (LOOK,)))
    before = talk.ask(RESULT).ids + family.ids(family.spell(Answer("done")))
    talk.answer(Answer("done"))
    got = talk.ask(follow_up())
    assert family.forgets or got.ids[: len(before)] == before


def test_a_tokenisation_of_the_models_own_is_kept(family):
    talk = Talk(family)
    talk.ask()
    letters = tuple(
        t for c in family.spell(Answer("hello")).partition("hello")[1] for t in family.ids(c)
    )
    head, _, tail = family.spell(Answer("hello")).partition("hello")
    ids = family.ids(head) + letters + family.ids(tail)
    assert ids != family.ids(head + "hello" + tail)
    before = talk.answer(Answer("hello"), ids)
    got = talk.ask(follow_up())
    assert family.forgets or got.ids[: len(before)] == before


# What single families need ----------------------------------------------------------------------


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
    assert make_renderer(other, "qwen2").stop_ids == {151643, 151645}


# Drift ------------------------------------------------------------------------------------------


def spaced():
    """A tokenizer that puts a space before whatever it encodes, and knows `s;` as one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["</s>", "▁", *"abdenorstuy:;?", "s;"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("s", ";")]))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'bot' if m.role == 'assistant' else 'user' }}:{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    )
    return tokenizer


def drift_after(renderer, ids, answer, *behind, question=QUESTION, tools=()):
    talk = Conversation()
    served = Served("call", talk.prompt(renderer, [question], tools, {}).ids, tuple(ids))
    talk.add(served, [question], {"role": "assistant", "content": answer}, tools, {})
    return talk.prompt(renderer, [question, *behind], tools, {})


def test_text_that_goes_on_within_a_token_is_drift_of_the_tokenisation():
    tokenizer = spaced()
    renderer = make_renderer(tokenizer, "mystery")
    behind = ({"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"})
    letters = tokenizer.convert_tokens_to_ids(["y", "e", "s"])
    question = {"role": "user", "content": "so?"}
    got = drift_after(renderer, letters, "yes", *behind, question=question)
    assert renderer.spell(got.ids).startswith("user:so?;bot:yes;")
    assert (got.parent, got.drift) == (None, "tokenisation")


def test_an_answer_that_was_rewritten_is_drift_of_an_edit():
    family = FAMILIES["llama3"]
    behind = ({"role": "assistant", "content": "five"}, follow_up())
    got = drift_after(family.renderer, family.ids("four<|eot_id|>"), "four", *behind)
    assert (got.parent, got.drift) == (None, "edited")


def test_a_template_that_leaves_answers_out_is_drift_of_the_template():
    tokenizer = families.build({"</s>": 2}, {"</s>"}, "{{ messages[-1].content }}\nbot:")
    renderer = make_renderer(tokenizer, "mystery")
    behind = ({"role": "assistant", "content": "four"}, follow_up())
    got = drift_after(renderer, renderer.encode("four</s>"), "four", *behind)
    assert (got.parent, got.drift) == (None, "template")


def test_an_answer_that_is_to_be_continued_keeps_its_tokens():
    family = FAMILIES["qwen2.5"]
    ids = family.ids("four<|im_end|>")
    got = drift_after(family.renderer, ids, "four", {"role": "assistant", "content": "four"})
    assert (got.parent, got.drift) == ("call", None)


# Through the gateway ----------------------------------------------------------------------------


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
