"""The gateway through the real, unmodified OpenAI client, over a real socket."""

import asyncio
import contextlib
import time
from typing import Any, cast

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.engine.scripted import Script, ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.schema.errors import StoreError
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import Call, Sampling
from fulmen.server.app import make_app
from fulmen.server.http import Listening

SECRET = b"0" * 32
USER: list[Any] = [{"role": "user", "content": "Tom has 2 pens."}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'


class Records:
    """Keeps calls in memory; `arrived` is set when one comes."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.superseded: list[tuple[str, int, str]] = []
        self.arrived = asyncio.Event()

    async def record_calls(self, calls) -> None:
        self.calls += calls
        self.arrived.set()

    async def supersede_calls(self, rollout_id, attempt, ids) -> None:
        self.superseded += [(rollout_id, attempt, name) for name in ids]


class World:
    """A gateway on a socket, and clients for it."""

    def __init__(self, url: str, engine: ScriptedEngine, records: Records, gateway: Gateway):
        self.url, self.engine, self.records, self.gateway = url, engine, records, gateway

    @property
    def calls(self) -> list[Call]:
        return self.records.calls

    def key(self, rollout="r", **claims) -> str:
        values: dict[str, Any] = {"attempt": 1, "expires": time.time() + 60, **claims}
        return mint_key(KeyClaims(rollout_id=rollout, **values), SECRET)

    def client(self, key: str | None = None) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key or self.key(), max_retries=0
        )


@pytest.fixture
def encode(tokenizer):
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def world(renderer, encode):
    @contextlib.asynccontextmanager
    async def make(script: Any, max_context=4096):
        replies = script if callable(script) else [encode(text) for text in script]
        engine = ScriptedEngine(cast("Script", replies), max_context=max_context)
        records = Records()
        models = Models([Policy("m", engine, renderer)])
        gateway = Gateway(models, records, SECRET)
        async with Listening(make_app(gateway), "127.0.0.1", 0) as server:
            yield World(server.url, engine, records, gateway)

    return make


async def ask(world: World, messages=USER, *, key=None, **options):
    async with world.client(key) as client:
        return await client.chat.completions.create(model="m", messages=messages, **options)


async def ask_streamed(world: World, messages=USER, **options):
    """All chunks of a streamed answer."""
    async with world.client() as client:
        stream = await client.chat.completions.create(
            model="m", messages=messages, stream=True, **options
        )
        return [chunk async for chunk in stream]


def joined(chunks) -> dict[str, Any]:
    """What a client makes of the chunks of one choice."""
    message: dict[str, Any] = {"content": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                message["calls"].append((call.function.name, call.function.arguments))
            message["finish"] = choice.finish_reason or message["finish"]
    return message


async def test_a_plain_answer_is_recorded_exactly_as_it_was_sampled(world, encode):
    async with world(["Tom has 5 pens.<|im_end|>"]) as w:
        answer = await ask(w)
        (call,) = w.calls
    assert answer.choices[0].message.content == "Tom has 5 pens."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "m"
    assert call.id == answer.id
    assert call.completion_ids == encode("Tom has 5 pens.<|im_end|>")
    assert call.logprobs == tuple(-0.5 * (n + 1) for n in range(len(call.completion_ids)))
    assert call.prompt_ids == w.engine.requests[0].prompt_ids
    assert call.prompt_ids[-3:] == encode("<|im_start|>assistant\n")
    assert (call.rollout_id, call.attempt, call.parent, call.drift) == ("r", 1, None, None)
    assert answer.usage.completion_tokens == len(call.completion_ids)
    assert call.request["messages"] == USER


async def test_a_tool_conversation_continues_token_for_token(world, encode):
    async with world([CALL + "<|im_end|>", "<answer>5</answer><|im_end|>"]) as w:
        first = await ask(w, tools=TOOLS)
        message = first.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == (
            "calculator",
            '{"expression": "2+3"}',
        )
        assert first.choices[0].finish_reason == "tool_calls"
        more = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "5"},
        ]
        second = await ask(w, more, tools=TOOLS)
        one, two = w.calls
    assert second.choices[0].message.content == "<answer>5</answer>"
    assert two.parent == one.id
    assert two.prompt_ids[: len(one.prompt_ids) + len(one.completion_ids)] == (
        one.prompt_ids + one.completion_ids
    )
    assert (one.index, two.index) == (0, 1)


async def test_oddly_spelled_tokens_are_reused_as_sampled_not_as_their_text_would_encode(
    world, tokenizer
):
    odd = tuple(
        token for letter in "pens" for token in tokenizer.encode(letter, add_special_tokens=False)
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tuple(tokenizer.encode("pens", add_special_tokens=False)) != odd
    replies = iter([(*odd, end), (end,)])
    async with world(lambda _: next(replies)) as w:
        await ask(w)
        more = [*USER, {"role": "assistant", "content": "pens"}, USER[0]]
        await ask(w, more)
        one, two = w.calls
    assert two.parent == one.id
    assert one.completion_ids == (*odd, end)
    assert two.prompt_ids[len(one.prompt_ids) :][: len(odd)] == odd


async def test_parallel_branches_each_continue_their_own_conversation(world):
    replies = [f"{n}<|im_end|>" for n in range(4)]
    async with world(replies) as w:
        questions = [[{"role": "user", "content": text}] for text in ("a", "b")]
        answers = [await ask(w, q) for q in questions]
        follow_ups = [
            [*q, {"role": "assistant", "content": a.choices[0].message.content}, USER[0]]
            for q, a in zip(questions, answers, strict=True)
        ]
        await asyncio.gather(*(ask(w, f) for f in follow_ups))
        by_id = {call.id: call for call in w.calls}
        later = [call for call in w.calls if call.parent]
    assert len(later) == 2
    for call in later:
        parent = by_id[call.parent]
        start = parent.prompt_ids + parent.completion_ids
        assert call.prompt_ids[: len(start)] == start


async def test_an_edited_history_is_rendered_anew_and_counted(world):
    async with world(["one<|im_end|>", "two<|im_end|>"]) as w:
        await ask(w)
        await ask(w, [*USER, {"role": "assistant", "content": "edited"}, USER[0]])
        _, two = w.calls
    assert two.parent is None
    assert two.drift == "edited"


async def test_rollouts_do_not_see_each_other_s_conversations(world):
    async with world(["one<|im_end|>", "two<|im_end|>"]) as w:
        await ask(w, key=w.key("a"))
        more = [*USER, {"role": "assistant", "content": "one"}, USER[0]]
        await ask(w, more, key=w.key("b"))
        assert w.calls[1].parent is None
        assert w.calls[1].drift is None


async def test_several_choices_are_recorded_one_by_one(world):
    async with world(["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]) as w:
        answer = await ask(w, n=3)
    assert {c.message.content for c in answer.choices} == {"one", "two", "three"}
    assert [c.choice for c in w.calls] == [0, 1, 2]
    assert len({c.id for c in w.calls}) == 3
    assert len({r.seed for r in w.engine.requests}) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_even_across_tokens(world, stream):
    async with world(["Tom has 5 pens now.<|im_end|>"]) as w:
        if stream:
            message = joined(await ask_streamed(w, stop=["5 p"]))
            content, finish = message["content"], message["finish"]
        else:
            answer = await ask(w, stop="5 p")
            content, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
        (call,) = w.calls
    assert content == "Tom has"
    assert finish == "stop"
    assert w.engine.aborted == [call.id]
    assert len(call.completion_ids) < 8


async def test_log_probabilities_come_with_their_tokens(world):
    async with world(["Tom has<|im_end|>"]) as w:
        answer = await ask(w, logprobs=True, top_logprobs=1)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == list(w.calls[0].logprobs)
    assert "".join(entry.token for entry in content) == "Tom has<|im_end|>"
    assert content[0].top_logprobs[0].token == content[0].token


async def test_the_rollout_s_sampling_wins_over_the_agent_s(world):
    sampling = Sampling(temperature=0.0, max_tokens=3)
    async with world(lambda _: [40] * 50) as w:
        key = w.key(sampling=sampling)
        answer = await ask(w, key=key, temperature=0.9, top_p=0.5, max_tokens=1000)
        (request,) = w.engine.requests
    assert (request.temperature, request.top_p, request.max_tokens) == (0.0, 0.5, 3)
    assert answer.choices[0].finish_reason == "length"
    assert (w.calls[0].temperature, w.calls[0].top_p) == (0.0, 0.5)


async def test_seeds_depend_on_the_rollout_and_the_prompt_not_on_arrival(world):
    async with world(lambda _: [40]) as w:
        a, b = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]
        for messages in (a, b, a):
            await ask(w, messages, key=w.key("x", seed=1))
        for messages in (b, a):
            await ask(w, messages, key=w.key("y", seed=1))
        await ask(w, a, key=w.key("z", seed=2))
        first_a, first_b, second_a, other_b, other_a, foreign = (r.seed for r in w.engine.requests)
    assert (first_a, first_b) == (other_a, other_b)
    assert len({first_a, first_b, second_a, foreign}) == 4


async def test_a_conversation_longer_than_the_context_gets_openai_s_own_error(world):
    async with world(["x"], max_context=20) as w:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(w, [{"role": "user", "content": "pens " * 30}])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 20 tokens" in str(caught.value)


async def test_an_absurd_max_tokens_is_cut_to_what_fits(world):
    async with world(["x<|im_end|>"], max_context=100) as w:
        await ask(w, max_tokens=64_000)
        (request,) = w.engine.requests
    assert len(request.prompt_ids) + request.max_tokens == 100


def forged(world: World) -> str:
    return mint_key(KeyClaims(rollout_id="r", attempt=1, expires=2e9), b"another secret")


@pytest.mark.parametrize(
    "key",
    [lambda _: "sk-something", forged, lambda w: w.key(expires=1.0), lambda w: w.key()[:-2]],
    ids=["foreign", "forged", "expired", "damaged"],
)
async def test_a_key_that_is_not_ours_is_refused_and_never_repeated(world, key):
    async with world([]) as w:
        wrong = key(w)
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(w, key=wrong)
    assert caught.value.code == "invalid_api_key"
    assert wrong not in str(caught.value)


async def test_the_key_is_also_read_from_anthropic_s_header(world):
    async with world(["x<|im_end|>"]) as w, httpx.AsyncClient() as client:
        answer = await client.get(f"{w.url}/v1/models", headers={"x-api-key": w.key()})
        without = await client.get(f"{w.url}/v1/models")
    assert answer.json()["data"][0]["id"] == "m"
    assert without.status_code == 401


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"temperature": 9}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stop": [1]}, "stop"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 10}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"model": 3}, "model"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_the_parameter_s_name(world, changes, param):
    body = {"model": "m", "messages": USER} | changes
    async with world([]) as w, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{w.url}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {w.key()}"},
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"null"])
async def test_a_malformed_body_is_a_client_error_and_the_server_goes_on(world, body):
    async with world(["x<|im_end|>"]) as w, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{w.url}/v1/chat/completions",
            content=body,
            headers={"authorization": f"Bearer {w.key()}"},
        )
        assert answer.status_code == 400
        assert "message" in answer.json()["error"]
        assert (await ask(w)).choices[0].message.content == "x"


async def test_a_body_over_the_limit_is_refused_before_it_is_read_to_its_end(world):
    async def endless():
        for _ in range(40):
            yield b" " * 2**20

    async with world([]) as w, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{w.url}/v1/chat/completions",
            content=endless(),
            headers={"authorization": f"Bearer {w.key()}"},
        )
    assert answer.status_code == 413


async def test_an_unknown_route_has_an_error_object_too(world):
    async with world([]) as w, httpx.AsyncClient() as client:
        answer = await client.get(f"{w.url}/v1/nothing")
    assert answer.status_code == 404
    assert "error" in answer.json()


async def test_a_failing_engine_is_a_server_error_without_a_traceback(world):
    async with world([]) as w:
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(w)
    assert "no reply left" in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_record_that_cannot_be_kept_is_a_server_error_never_a_lost_call(world, stream):
    async with world(["x<|im_end|>"]) as w, httpx.AsyncClient() as client:

        async def full(calls) -> None:
            raise StoreError("run.db: no space left on device")

        w.records.record_calls = full
        answer = await client.post(
            f"{w.url}/v1/chat/completions",
            json={"model": "m", "messages": USER, "stream": stream},
            headers={"authorization": f"Bearer {w.key()}"},
        )
    assert "no space left on device" in answer.text
    assert "[DONE]" not in answer.text
    assert answer.status_code == (200 if stream else 500)


async def test_tokens_are_streamed_while_they_are_sampled(world):
    async with world(["Tom has 5 pens.<|im_end|>"]) as w, w.client() as client:
        w.engine.hold()
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        w.engine.step(1)
        assert (await anext(stream)).choices[0].delta.content == "Tom"
        w.engine.step(100)
        rest = joined([chunk async for chunk in stream])
    assert rest["content"] == " has 5 pens."
    assert rest["finish"] == "stop"


async def test_a_streamed_tool_call_arrives_whole_and_its_markup_never_as_text(world):
    async with world(["Let me see.\n" + CALL + "<|im_end|>"]) as w:
        message = joined(await ask_streamed(w, tools=TOOLS))
    assert message["content"] == "Let me see."
    assert message["calls"] == [("calculator", '{"expression": "2+3"}')]
    assert message["finish"] == "tool_calls"


async def test_reasoning_is_streamed_as_reasoning(world):
    async with world(["<think>\nhm so\n</think>\n\nfive<|im_end|>"]) as w:
        chunks = await ask_streamed(w)
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hm so"
    assert "".join(d.content or "" for d in deltas) == "five"


async def test_usage_is_the_last_chunk_when_asked_for(world):
    async with world(["x<|im_end|>"]) as w:
        chunks = await ask_streamed(w, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(w.calls[0].completion_ids)


async def test_leaving_a_stream_aborts_the_sampling_and_records_what_was_sampled(world):
    async with world(["Tom has 5 pens.<|im_end|>"]) as w, w.client() as client:
        w.engine.hold()
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        await anext(stream)
        w.engine.step(2)
        await anext(stream)
        await stream.close()
        await w.records.arrived.wait()
        (call,) = w.calls
    assert call.finish_reason == "abort"
    assert 1 <= len(call.completion_ids) <= 2
    assert w.engine.aborted == [call.id]


async def test_hanging_up_on_a_plain_request_aborts_it_too(world):
    async with world(["Tom has 5 pens.<|im_end|>"]) as w:
        w.engine.hold()
        asking = asyncio.ensure_future(ask(w, stop=["never said"]))
        while not w.engine.requests:
            await asyncio.sleep(0)
        asking.cancel()
        await w.records.arrived.wait()
        (call,) = w.calls
    assert call.finish_reason == "abort"
    assert w.engine.aborted == [call.id]


async def test_requests_wait_while_weights_change_and_nobody_sees_an_error(world):
    async with world(["x<|im_end|>"]) as w:
        async with w.gateway.hold():
            asking = asyncio.ensure_future(ask(w))
            async with httpx.AsyncClient() as client:
                await client.get(f"{w.url}/health")
            assert not w.engine.requests
        assert (await asking).choices[0].message.content == "x"


async def test_an_attempt_that_has_ended_is_refused_and_another_starts_anew(world):
    async with world(["one<|im_end|>", "two<|im_end|>"]) as w:
        await ask(w)
        w.gateway.forget("r", 1)
        again = [*USER, {"role": "assistant", "content": "one"}, USER[0]]
        with pytest.raises(openai.PermissionDeniedError, match="attempt 1 of rollout r has ended"):
            await ask(w, again)
        await ask(w, again, key=w.key(attempt=2))
        assert [(call.attempt, call.parent) for call in w.calls] == [(1, None), (2, None)]


@pytest.mark.parametrize("choices", [1, 2])
async def test_when_an_attempt_ends_what_it_asked_for_is_aborted_and_told_why(world, choices):
    async with world(["Tom has 5 pens.<|im_end|>"] * 2) as w:
        w.engine.hold()
        asking = asyncio.ensure_future(ask(w, n=choices))
        while len(w.engine.requests) < choices:
            await asyncio.sleep(0)
        await asyncio.to_thread(w.gateway.forget, "r", 1)
        with pytest.raises(openai.PermissionDeniedError, match="attempt 1 of rollout r has ended"):
            await asking
        assert sorted(w.engine.aborted) == sorted(call.id for call in w.calls)
        assert {call.finish_reason for call in w.calls} == {"abort"}


async def test_when_an_attempt_ends_its_stream_ends_with_the_reason(world):
    async with world(["Tom has 5 pens.<|im_end|>"]) as w:
        w.engine.hold()
        async with w.client() as client:
            stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
            while not w.engine.requests:
                await asyncio.sleep(0)
            w.gateway.forget("r", 1)
            with pytest.raises(openai.APIError, match="attempt 1 of rollout r has ended"):
                async for _ in stream:
                    pass
        assert w.engine.aborted == [w.calls[0].id]


async def test_an_attempt_that_ends_while_weights_change_waits_no_longer(world):
    async with world([]) as w, w.gateway.hold():
        asking = asyncio.ensure_future(ask(w))
        while not w.gateway._attempts._by_key:
            await asyncio.sleep(0)
        w.gateway.forget("r", 1)
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            await asking


texts = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), st.sampled_from(" \n")
    ),
    max_size=40,
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=texts, stop=st.none() | st.text(min_size=1, max_size=3))
async def test_streamed_pieces_reassemble_to_the_unstreamed_answer(world, encode, text, stop):
    options: dict[str, Any] = {} if stop is None else {"stop": [stop]}
    async with world([text + "<|im_end|>"] * 2) as w:
        whole = (await ask(w, **options)).choices[0]
        message = joined(await ask_streamed(w, **options))
    assert message["content"] == (whole.message.content or "")
    assert message["finish"] == whole.finish_reason
    assert w.calls[0].completion_ids == w.calls[1].completion_ids
