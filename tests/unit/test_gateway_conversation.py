"""How a request is matched with what was served, over a format simple enough to read."""

import pytest

from fulmen.gateway.conversation import Conversation, Served
from fulmen.gateway.form import AnswerForm, Dialect
from fulmen.gateway.render import Answer


class Words:
    """One token per character; an answer ends with "|"."""

    @property
    def stop_ids(self):
        return frozenset({ord("|")})

    @property
    def markers(self):
        return {}

    @property
    def form(self):
        return AnswerForm(Dialect(), {})

    def render(self, messages, tools, options):  # noqa: ARG002
        return tuple(ord(c) for m in messages for c in f"{m.get('content') or ''}|")

    def parse(self, prompt, completion, tools):  # noqa: ARG002
        return Answer(self.decode(completion))

    def decode(self, ids):
        return "".join(map(chr, ids))

    def spell(self, ids):
        return self.decode(ids)

    def reading(self, prompt, tools):
        raise NotImplementedError

    def encode(self, text):
        return tuple(map(ord, text))

    def extend(self, served, messages, known, tools, options):
        return served[0] + served[1] + self.render(messages[known:], tools, options)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def serve(conversation, messages, answer, name, tools=()):
    prompt = conversation.prompt(Words(), messages, tools, {})
    # Sampled in capitals: a new rendering of the text would not give these tokens.
    ids = tuple(ord(c) for c in (answer["content"] or "").upper() + "|")
    conversation.add(Served(name, prompt.ids, ids), messages, answer, tools, {})
    return prompt.ids + ids


def test_the_longest_served_conversation_is_continued():
    talk = Conversation()
    serve(talk, [user("a")], said("b"), "one")
    longer = serve(talk, [user("a"), said("b"), user("c")], said("d"), "two")
    got = talk.prompt(Words(), [user("a"), said("b"), user("c"), said("d"), user("e")], (), {})
    assert (got.parent, got.drift) == ("two", None)
    assert got.ids[: len(longer)] == longer


@pytest.mark.parametrize(
    "again",
    [
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "b", "tool_calls": None, "refusal": None},
        {"role": "assistant", "content": "b", "name": "writer"},
    ],
)
def test_another_spelling_of_the_same_answer_is_the_same_answer(again):
    talk = Conversation()
    serve(talk, [user("a")], said("b"), "one")
    assert talk.prompt(Words(), [user("a"), again, user("c")], (), {}).parent == "one"


def test_other_tools_or_options_are_another_conversation():
    talk = Conversation()
    serve(talk, [user("a")], said("b"), "one")
    more = [user("a"), said("b"), user("c")]
    tool = {"type": "function", "function": {"name": "f"}}
    assert talk.prompt(Words(), more, [tool], {}).parent is None
    assert talk.prompt(Words(), more, (), {"enable_thinking": False}).parent is None


def test_an_edited_answer_is_drift_and_a_new_question_is_not():
    talk = Conversation()
    serve(talk, [user("a")], said("b"), "one")
    assert talk.prompt(Words(), [user("a"), said("x"), user("c")], (), {}).drift == "edited"
    assert talk.prompt(Words(), [user("z")], (), {}).drift is None


TURN = (("ask.", "YES"), "one"), (("ask.YES more.", "NO|"), "two")


def raw(*served):
    talk = Conversation()
    for (prompt, completion), name in served:
        ids = tuple(map(ord, prompt)), tuple(map(ord, completion))
        talk.add_raw(Served(name, *ids), prompt + completion.removesuffix("|"))
    return talk


def letters(ids):
    return "".join(map(chr, ids))


def test_a_text_prompt_continues_the_longest_served_text_it_begins_with():
    got = raw(*TURN).raw_prompt(Words(), "ask.YES go")
    assert (got.parent, letters(got.ids)) == ("one", "ask.YES go")
    assert raw(*TURN).raw_prompt(Words(), "something else").parent is None


def test_text_behind_a_completion_that_ended_by_itself_reuses_its_tokens_without_the_end():
    got = raw(*TURN).raw_prompt(Words(), "ask.YES more.NO go")
    assert (got.parent, letters(got.ids)) == (None, "ask.YES more.NO go")


def test_a_token_prompt_is_taken_as_it_is_and_finds_the_call_it_extends():
    ids = tuple(map(ord, "ask.YES more.NO|and"))
    assert raw(*TURN).raw_prompt(Words(), ids).parent == "two"
    assert raw(*TURN).raw_prompt(Words(), ids[:8]).parent == "one"
    assert raw(*TURN).raw_prompt(Words(), ids[:7]).parent is None
