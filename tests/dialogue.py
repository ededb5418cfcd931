"""What is said to model families in tests, what they answer, and how it is read."""

import json

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from families import FAMILIES
from fulmen.gateway.completion import TextStream
from fulmen.gateway.conversation import Conversation, Prompt, Served
from fulmen.gateway.render import Answer, ToolCall

TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {}}}
    for name in ("add", "look_up")
]
QUESTION = {"role": "user", "content": "2 and 2?"}
ADD = ToolCall("add", '{"a": 2, "b": "two words"}')
LOOK = ToolCall("look_up", '{"deep": {"list": [1, null, "x"]}}')


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


def streamed(family, prompt, ids, tools=TOOLS):
    """What a stream has given of each field after every token."""
    stream = TextStream(family.renderer, (), family.renderer.reading(prompt, tools))
    got, after = {"content": "", "reasoning_content": ""}, []
    for token in ids:
        for name, text in stream.push([token]):
            got[name] += text
        after.append(dict(got))
    return after


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
