"""Answers of a given form: JSON, forced calls, strict tools, from weights that know nothing."""

import json

import pytest
import torch

from batches import batch_of
from fulmen.credit.trajectory import assemble
from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.gateway.dialects import DEEPSEEK, GLM, HARMONY, LLAMA3, PLAIN, QWEN
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.form import AnswerForm, ForcedCall, JsonOutput
from fulmen.learner.logprobs import score
from fulmen.schema.errors import GrammarError
from fulmen.schema.records import Credited, Outcome, Rollout, RolloutResult, Task
from gateways import Face
from models import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "hi"}]


def function(name, strict=True):
    return {"name": name, "description": "d", "parameters": SCHEMA, "strict": strict}


TOOLS = [{"type": "function", "function": function(name)} for name in ("paint", "count")]
FLAT = [{"type": "function", **function(name)} for name in ("paint", "count")]
ANTHROPIC = [{"name": name, "input_schema": SCHEMA} for name in ("paint", "count")]


@pytest.fixture
async def face(tokenizer, renderer):
    """A gateway before random weights."""
    vocabulary = len(tokenizer) + 9
    model = tiny_model(
        seed=3,
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    grammars = GrammarCompiler(tokenizer, vocabulary, renderer.stop_ids)
    engine = LocalEngine(model, name="m", max_context=4096, grammars=grammars)
    made = Face(tokenizer, engine=engine)
    made.model, made.grammars = model, grammars
    yield made
    await engine.close()


def check(value):
    assert set(value) == {"colour", "count"}
    assert value["colour"] in ("red", "blue")
    assert 0 <= value["count"] <= 99


SHAPE = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


async def test_chat_answers_in_json_of_the_schema_whole_and_streamed(face):
    body = {"messages": QUESTION, "response_format": SHAPE, "seed": 1, "n": 3}
    whole = await face.ask("/chat/completions", **body)
    for choice in whole["choices"]:
        check(json.loads(choice["message"]["content"]))
    texts = ["", "", ""]
    for event in (await face.events("/chat/completions", **body))[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    for text in texts:
        check(json.loads(text))


async def test_responses_answer_in_json_of_the_schema(face):
    form = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    answer = await face.ask("/responses", input="hi", text={"format": form})
    check(json.loads(answer["output"][-1]["content"][0]["text"]))


async def test_messages_answer_in_json_of_the_schema(face):
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = await face.ask("/messages", messages=QUESTION, max_tokens=900, output_config=form)
    check(json.loads(answer["content"][-1]["text"]))


async def test_json_mode_gives_an_object(face):
    answer = await face.ask(
        "/chat/completions",
        messages=QUESTION,
        response_format={"type": "json_object"},
        max_tokens=2000,
    )
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)
    else:
        assert answer["choices"][0]["message"]["content"].startswith("{")


async def test_a_forced_tool_of_chat_is_called_with_strict_arguments(face):
    for seed in range(4):
        answer = await face.ask(
            "/chat/completions",
            messages=QUESTION,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "paint"}},
            parallel_tool_calls=False,
            seed=seed,
        )
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "paint"
        check(json.loads(call["function"]["arguments"]))


async def test_responses_that_require_a_tool_call_one_of_them(face):
    answer = await face.ask(
        "/responses", input="hi", tools=FLAT, tool_choice="required", parallel_tool_calls=False
    )
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    assert call["name"] in ("paint", "count")
    check(json.loads(call["arguments"]))


async def test_messages_that_choose_any_tool_call_one_and_never_two_when_told_so(face):
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = await face.ask(
        "/messages", messages=QUESTION, max_tokens=900, tools=ANTHROPIC, tool_choice=choice
    )
    (call,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert call["name"] in ("paint", "count")


async def test_the_grammar_is_recorded_and_the_learner_scores_what_was_recorded(face):
    await face.ask("/chat/completions", messages=QUESTION, response_format=SHAPE, temperature=0.8)
    (call,) = face.calls
    assert "%json" in call.grammar
    trajectory, dropped = assemble(
        RolloutResult(
            rollout=Rollout(id="r", task=Task(id="t", input=0), group="g", step=1),
            attempt=1,
            outcome=Outcome(),
            calls=(call,),
        ),
        1.0,
    )
    assert dropped == []
    credited = [Credited(transition=one, advantage=1.0) for one in trajectory.transitions]
    batch = batch_of(credited)
    with torch.no_grad():
        scores = score(face.model, batch, grammars=face.grammars)
    torch.testing.assert_close(scores.logprobs, torch.tensor(call.logprobs), atol=1e-4, rtol=0)


async def test_an_ordinary_request_has_no_grammar(face, tokenizer):
    plain = Face(tokenizer, "hello")
    await plain.ask(
        "/chat/completions",
        messages=QUESTION,
        tools=[{"type": "function", "function": function("f", strict=False)}],
    )
    assert plain.calls[0].grammar == plain.engine.requests[0].grammar == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/chat/completions",
            {
                "messages": QUESTION,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"not": {"type": "string"}}},
                },
            },
        ),
        (
            "/messages",
            {
                "messages": QUESTION,
                "max_tokens": 9,
                "output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}},
            },
        ),
        (
            "/responses",
            {
                "input": "hi",
                "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": 7}}},
            },
        ),
    ],
)
async def test_a_schema_that_cannot_be_kept_to_is_refused_with_the_reason(face, path, body):
    response = await face.post(path, **body)
    assert response.status_code == 400
    assert "cannot be held to its form" in response.json()["error"]["message"]
    assert [call.status for call in face.calls] == [400]


# What each family's grammar accepts, over the tokens of the family's own spelling.

FAMILIES = {
    "qwen": (
        QWEN,
        '<tool_call>\n{"name": "paint", "arguments": @}\n</tool_call>',
        "<think>\nhm</think>\n\n",
        "",
    ),
    "llama": (LLAMA3, '{"name": "paint", "parameters": @}', "", ""),
    "gpt-oss": (
        HARMONY,
        "<|channel|>commentary to=functions.paint <|constrain|>json<|message|>@<|call|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
    ),
    "deepseek": (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>paint\n"
        "```json\n@\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<think>hm</think>",
        "",
    ),
    "glm": (
        GLM,
        "\n<tool_call>paint\n<arg_key>colour</arg_key>\n<arg_value>red</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
        "\n<think>hm</think>",
        "\n",
    ),
}
THINKS = ("glm",)
"""Families whose answers must begin with reasoning."""
ARGUMENTS = '{"colour": "red", "count": 7}'


def spelled(dialect, *texts):
    """A tokenizer that has the structural tokens of the texts, and a form over it."""
    import re

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bare = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bare)
    tags = list(dict.fromkeys(re.findall(r"</?[a-z_]+>|<[|｜][^>]*[|｜]>", "".join(texts))))
    fast.add_special_tokens({"additional_special_tokens": [*tags, "<end>"]})
    ids = {token.content: place for place, token in fast.added_tokens_decoder.items()}
    return fast, AnswerForm(dialect, ids), ids


def accepts(fast, grammar, text):
    stop = fast.convert_tokens_to_ids("<end>")
    compiler = GrammarCompiler(fast, len(fast), frozenset({stop}))
    matcher = compiler.start(grammar)
    for token in [*fast.encode(text, add_special_tokens=False), stop]:
        if not matcher.mask()[token // 32] >> (token % 32) & 1:
            return False
        matcher.advance(token)
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_s_own_spelling_of_a_call_is_what_is_forced(family):
    dialect, call, reasons, text = FAMILIES[family]
    fast, form, _ = spelled(dialect, call, reasons, text)
    grammar = form.grammar(ForcedCall(("paint",)), TOOLS, ())
    right = reasons + call.replace("@", ARGUMENTS)
    assert accepts(fast, grammar, right)
    assert accepts(fast, grammar, right.removeprefix(reasons)) is (family not in THINKS)
    assert not accepts(fast, grammar, reasons + text + "hello")
    assert not accepts(fast, grammar, right.replace("paint", "count"))
    assert not accepts(fast, grammar, right.replace("7", '"7"'))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_answers_in_json_after_its_reasoning(family):
    dialect, call, reasons, text = FAMILIES[family]
    fast, form, _ = spelled(dialect, call, reasons, text)
    grammar = form.grammar(JsonOutput(SCHEMA), (), ())
    assert accepts(fast, grammar, reasons + text + ARGUMENTS)
    assert not accepts(fast, grammar, reasons + text + "hello")


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_tools_leave_text_free_and_hold_calls_to_their_schema(family):
    dialect, call, reasons, text = FAMILIES[family]
    fast, form, _ = spelled(dialect, call, reasons, text)
    grammar = form.grammar(None, TOOLS, ())
    assert accepts(fast, grammar, reasons + text + "well, hello")
    assert accepts(fast, grammar, reasons + call.replace("@", ARGUMENTS))
    assert not accepts(fast, grammar, reasons + call.replace("@", "{}").replace(">7<", ">x<"))


@pytest.mark.parametrize("family", ["qwen", "deepseek", "glm"])
def test_two_calls_are_allowed_unless_the_client_wants_one(family):
    dialect, call, reasons, text = FAMILIES[family]
    fast, form, _ = spelled(dialect, call, reasons, text)
    one = call.replace("@", ARGUMENTS)
    if family == "deepseek":
        two = one.replace("<｜tool▁calls▁end｜>", "\n") + one.replace("<｜tool▁calls▁begin｜>", "")
    else:
        two = one + "\n" + one.lstrip("\n")
    assert accepts(fast, form.grammar(ForcedCall(("paint",)), TOOLS, ()), reasons + two)
    assert not accepts(fast, form.grammar(None, TOOLS, (), parallel=False), reasons + two)


def test_reasoning_that_the_prompt_has_opened_must_be_closed_and_a_closed_one_is_over():
    dialect, call, reasons, text = FAMILIES["qwen"]
    fast, form, ids = spelled(dialect, call, reasons, text)
    opened = form.grammar(JsonOutput(SCHEMA), (), (1, ids["<think>"], 2))
    assert accepts(fast, opened, "hm</think>\n\n" + ARGUMENTS)
    assert not accepts(fast, opened, ARGUMENTS)
    closed = form.grammar(JsonOutput(SCHEMA), (), (1, ids["<think>"], ids["</think>"], 2))
    assert accepts(fast, closed, ARGUMENTS)
    assert not accepts(fast, closed, reasons + ARGUMENTS)


def test_a_format_without_calls_refuses_to_be_forced_to_one():
    with pytest.raises(RequestRefused, match="no tool calls"):
        AnswerForm(PLAIN, {}).grammar(ForcedCall(("paint",)), TOOLS, ())


def test_text_between_tags_takes_enums_options_and_unknown_arguments():
    dialect, spelling, reasons, text = FAMILIES["glm"]
    fast, form, _ = spelled(dialect, spelling, reasons, text)
    schema = {
        "properties": {"a": {"type": "string", "enum": ["x", "y"]}, "b": {"type": "string"}},
        "required": ["a"],
    }
    tool = {"function": {"name": "f", "parameters": schema, "strict": True}}
    grammar = form.grammar(ForcedCall(("f",)), [tool], ())
    pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n".format
    call = "\n<think>hm</think>\n<tool_call>f\n{}</tool_call>".format
    assert accepts(fast, grammar, call(pair("a", "x")))
    assert accepts(fast, grammar, call(pair("a", "y") + pair("b", "free")))
    assert not accepts(fast, grammar, call(pair("a", "z")))
    assert not accepts(fast, grammar, call(pair("b", "x")))
    anything = {"function": {"name": "f", "parameters": schema}}
    grammar = form.grammar(ForcedCall(("f",)), [anything], ())
    assert accepts(fast, grammar, call(pair("q", "1")))


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_that_are_in_the_prompt_and_withheld_cannot_be_called(family):
    dialect, call, reasons, text = FAMILIES[family]
    fast, form, _ = spelled(dialect, call, reasons, text)
    grammar = form.grammar(None, (), (), withheld=True)
    assert accepts(fast, grammar, reasons + text + "well, hello")
    assert not accepts(fast, grammar, reasons + call.replace("@", ARGUMENTS))


def test_bare_calls_and_json_answers_cannot_be_asked_for_at_once():
    dialect, call, reasons, text = FAMILIES["llama"]
    _, form, _ = spelled(dialect, call, reasons, text)
    with pytest.raises(RequestRefused, match="not both"):
        form.grammar(JsonOutput(SCHEMA), TOOLS, ())


@pytest.mark.parametrize("space", ["", " ", "\n", "\t", "\r", "\u00a0"])
def test_white_space_before_a_bare_call_does_not_make_it_text(space):
    dialect, call, reasons, text = FAMILIES["llama"]
    fast, form, _ = spelled(dialect, call, reasons, text)
    wrong = space + call.replace("@", '{"zzz": 1}')
    assert not accepts(fast, form.grammar(None, TOOLS, ()), wrong)


def strict(schema):
    return [{"function": {"name": "f", "parameters": schema, "strict": True}}]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}},
        {"anyOf": [{"type": "object"}]},
        {"properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"properties": {"a": {"type": "string", "format": "date"}}},
    ],
)
def test_what_tagged_arguments_cannot_be_held_to_is_refused(schema):
    dialect, call, reasons, text = FAMILIES["glm"]
    _, form, _ = spelled(dialect, call, reasons, text)
    with pytest.raises(GrammarError, match="cannot be held"):
        form.grammar(ForcedCall(("f",)), strict(schema), ())


def test_tagged_arguments_are_held_to_lengths_constants_references_and_emptiness():
    dialect, spelling, reasons, text = FAMILIES["glm"]
    fast, form, _ = spelled(dialect, spelling, reasons, text)
    pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n".format
    call = "\n<think></think>\n<tool_call>f\n{}</tool_call>".format

    def passes(schema, arguments):
        grammar = form.grammar(ForcedCall(("f",)), strict(schema), ())
        return accepts(fast, grammar, call(arguments))

    short = {"properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a"]}
    assert passes(short, pair("a", "xy"))
    assert not passes(short, pair("a", "xyz"))
    fixed = {"properties": {"a": {"type": "string", "const": "x"}}, "required": ["a"]}
    assert passes(fixed, pair("a", "x"))
    assert not passes(fixed, pair("a", "y"))
    colour = {
        "properties": {"a": {"$ref": "#/$defs/C"}},
        "required": ["a"],
        "$defs": {"C": {"enum": ["red"], "type": "string"}},
    }
    assert passes(colour, pair("a", '"red"'))
    assert not passes(colour, pair("a", '"blue"'))
    nothing = {"properties": {}, "additionalProperties": False}
    assert passes(nothing, "")
    assert not passes(nothing, pair("rm", "all"))


async def test_a_tool_choice_of_none_keeps_the_conversation_and_forbids_the_call(face):
    tools = [{"type": "function", "function": function("paint", strict=False)}]
    one = await face.ask(
        "/chat/completions", messages=QUESTION, tools=tools, tool_choice="none", max_tokens=30
    )
    message = one["choices"][0]["message"]
    assert not message.get("tool_calls")
    if one["choices"][0]["finish_reason"] == "stop":
        more = [*QUESTION, message, *QUESTION]
        await face.ask("/chat/completions", messages=more, tools=tools, max_tokens=5)
        assert face.calls[1].parent == face.calls[0].id


async def test_a_tool_choice_of_none_renders_the_tools_all_the_same(tokenizer):
    plain = Face(tokenizer, "hello", "more")
    tools = [{"type": "function", "function": function("paint", strict=False)}]
    await plain.ask("/chat/completions", messages=QUESTION, tools=tools, tool_choice="none")
    more = [*QUESTION, {"role": "assistant", "content": "hello"}, *QUESTION]
    await plain.ask("/chat/completions", messages=more, tools=tools)
    first, second = plain.calls
    assert "paint" in tokenizer.decode(first.prompt_ids)
    assert "FREE" in first.grammar
    assert second.parent == first.id


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": TOOLS + TOOLS[:1]}, "two of the name"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "without spaces"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": []},
                },
            },
            "allows no tool",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format",
        ),
        ({"modalities": ["text", "audio"]}, "audio"),
    ],
)
async def test_forms_that_make_no_sense_are_refused_in_words(tokenizer, body, words):
    response = await Face(tokenizer).post("/chat/completions", messages=QUESTION, **body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_a_schema_too_deep_to_be_written_is_refused(face):
    depth = 950  # JSON as deep as the gateway's decoder reads, deeper than Python's writes
    schema = '{"items":' * depth + "{}" + "}" * depth
    form = '{"type":"json_schema","json_schema":{"name":"s","schema":' + schema + "}}"
    body = '{"model":"m","messages":[{"role":"user","content":"q"}],"response_format":' + form + "}"
    response = await face.client.post("/v1/chat/completions", content=body.encode())
    assert response.status_code == 400
    assert response.json()["error"]["message"]
