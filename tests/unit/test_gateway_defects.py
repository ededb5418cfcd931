"""What the policy or a client may send, and must not break the gateway or lose its record."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.gateway.render import make_renderer
from gateways import Face

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "q"}]


class Templated:
    """The tokenizer with a chat template of its own."""

    chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


class Chat(Face):
    """Asked at chat completions."""

    async def post(self, messages=QUESTION, **options):
        return await super().post("/chat/completions", messages=messages, **options)

    async def post_bytes(self, body):
        return await self.client.post("/v1/chat/completions", content=body)


def whole(response):
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = [c["function"] for c in message.get("tool_calls", [])]
    reasoning = message.get("reasoning_content") or ""
    return message["content"] or "", reasoning, calls, choice["finish_reason"]


def joined(response):
    content = reasoning = ""
    calls, finish = [], None
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            content += choice["delta"].get("content") or ""
            reasoning += choice["delta"].get("reasoning_content") or ""
            calls += [c["function"] for c in choice["delta"].get("tool_calls", [])]
            finish = choice["finish_reason"] or finish
    return content, reasoning, calls, finish


PIECES = st.sampled_from(
    [
        "hello ",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "\n",
        "☃",
        "𝄞",
        "STOP",
        "ST",
        '{"name": "add", "arguments": {"a": 1}}',
        "<|im_start|>",
        "  ",
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(PIECES | st.text(max_size=4), max_size=8).map("".join),
    noise=st.lists(st.integers(3, 300), max_size=6),
    tools=st.booleans(),
    stop=st.booleans(),
)
def test_a_stream_put_together_is_the_whole_message(tokenizer, text, noise, tools, stop):
    async def compare():
        end = tokenizer.eos_token_id
        encoded = tokenizer.encode(text, add_special_tokens=False)
        reply = [i for i in encoded + noise if i != end] + [end]
        face = Chat(tokenizer, list(reply), list(reply))
        options = {"tools": TOOLS if tools else None, "stop": "STOP" if stop else None}
        assert joined(await face.post(stream=True, **options)) == whole(await face.post(**options))

    asyncio.run(compare())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = ["model", "messages", "tools", "n", "stop", "temperature", "chat_template_kwargs", "seed"]


@settings(max_examples=150, deadline=None)
@given(
    change=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1),
    message=st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id"]), JSON
    ),
)
def test_no_body_is_a_failure_of_the_server(tokenizer, change, message):
    async def send():
        face = Chat(tokenizer, *["ok"] * 128)
        body = {"model": "m", "messages": [*QUESTION, {**QUESTION[0], **message}], **change}
        response = await face.post_bytes(json.dumps(body).encode())
        assert response.status_code < 500, response.text
        assert response.status_code == 200 or set(response.json()) == {"error"}

    asyncio.run(send())


@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("1}", '"\\ud800"}'),
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        CALL.replace('"add"', "5"),
    ],
    ids=["lone surrogate", "deep brackets", "a name that is no text"],
)
async def test_whatever_the_policy_writes_is_answered_and_recorded(tokenizer, text):
    face = Chat(tokenizer, text)
    assert (await face.post(tools=TOOLS)).status_code == 200
    assert list(face.calls[0].completion_ids) == face.ids(text + "<|im_end|>")


async def test_malformed_calls_and_calls_that_nobody_offered_stay_text(tokenizer):
    face = Chat(tokenizer, f"{CALL}\n<tool_call>\n{{bad}}\n</tool_call>", CALL)
    content, _, calls, _ = whole(await face.post(tools=TOOLS))
    assert "{bad}" in content
    assert len(calls) == 1
    content, _, calls, finish = whole(await face.post(tools=TOOLS, tool_choice="none"))
    assert (content, calls, finish) == (CALL, [], "stop")


@pytest.mark.parametrize("role", ["developer", "function"])
async def test_no_role_is_left_out_of_the_prompt(tokenizer, role):
    face = Chat(tokenizer, "ok")
    await face.post([*QUESTION, {"role": role, "name": "f", "content": "IMPORTANT"}])
    assert "IMPORTANT" in tokenizer.decode(face.engine.requests[0].prompt_ids)


async def test_a_follow_up_question_continues_a_conversation_without_reasoning(tokenizer):
    face = Chat(tokenizer, "hello", "more")
    await face.post()
    answer = {"role": "assistant", "content": "hello"}
    await face.post([*QUESTION, answer, {"role": "user", "content": "and?"}])
    first, second = face.calls
    assert (second.parent, second.drift) == (first.id, None)


async def test_arguments_spelled_anew_by_a_client_are_the_same_call(tokenizer):
    face = Chat(tokenizer, CALL, "ok")
    message = (await face.post(tools=TOOLS)).json()["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=2)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    await face.post([*QUESTION, message, result], tools=TOOLS)
    assert face.calls[1].parent == face.calls[0].id


async def test_examples_in_the_prompt_are_no_edited_history(tokenizer):
    face = Chat(tokenizer, "one", "two")
    shown = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for question in "ab":
        await face.post([*shown, {"role": "user", "content": question}])
    assert [c.drift for c in face.calls] == [None, None]


def test_a_model_of_no_known_family_is_served_by_its_template(tokenizer):
    renderer = make_renderer(Templated(tokenizer), "mistral")
    assert renderer.parse((), tuple(tokenizer.encode(CALL)), TOOLS).tool_calls
