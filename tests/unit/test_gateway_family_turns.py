"""How the conversations of every model family go on, and why some cannot."""

import pytest

import families
from dialogue import ADD, LOOK, QUESTION, RESULT, Talk, follow_up, having
from families import FAMILIES
from fulmen.gateway.conversation import Conversation, Served
from fulmen.gateway.render import Answer, make_renderer

pytestmark = pytest.mark.usefixtures("harmony")


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return FAMILIES[request.param]


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
