"""Several models, models elsewhere, keys, retries and holds: over a real socket."""

import asyncio
import contextlib
import json
import time
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from fulmen.engine.scripted import ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.external import External
from fulmen.gateway.models import Models
from fulmen.schema.errors import EngineError
from fulmen.schema.headers import AGENT, TRACEPARENT
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import Call, Sampling
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from gateways import events_of

SECRET = b"1" * 32
USER: list[Any] = [{"role": "user", "content": "q"}]
CHAT = "/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    "/completions": {"prompt": "q", "max_tokens": 50},
    "/messages": {"messages": USER, "max_tokens": 50},
    "/responses": {"input": "q"},
}


class Records:
    """Keeps calls in memory, and says when one comes."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.superseded: list[str] = []
        self._changed = asyncio.Condition()

    async def record_calls(self, calls) -> None:
        async with self._changed:
            self.calls += calls
            self._changed.notify_all()

    async def supersede_calls(self, rollout_id, attempt, ids) -> None:  # noqa: ARG002
        self.superseded += ids

    async def first(self) -> Call:
        async with self._changed:
            await self._changed.wait_for(lambda: self.calls)
        return self.calls[0]


class World:
    """Two policies and a model elsewhere, behind one gateway on a socket."""

    def __init__(self, url, encode, records, gateway, engines):
        self.url, self.records, self.gateway = url, records, gateway
        self.encode, self.engines = encode, engines
        self.http = httpx.AsyncClient()

    def key(self, rollout="r", **claims) -> str:
        values: dict[str, Any] = {"attempt": 1, "expires": time.time() + 60, **claims}
        return mint_key(KeyClaims(rollout_id=rollout, **values), SECRET)

    async def post(self, path=CHAT, *, root="/v1", headers=None, **body) -> httpx.Response:
        given = {"authorization": f"Bearer {self.key()}"} if headers is None else headers
        whole = {"model": "one", **BODIES[path], **body}
        return await self.http.post(f"{self.url}{root}{path}", json=whole, headers=given)


async def elsewhere(request: Request):
    """A model of somebody else's."""
    body = await request.json()
    if body["messages"] == []:
        return JSONResponse({"error": {"message": "no messages"}}, 422, {"retry-after": "7"})
    answer = {"id": f"theirs-{body['model']}", "said": request.headers["authorization"]}
    if not body.get("stream"):
        return JSONResponse(answer)

    async def parts():
        for part in ("a", "b"):
            yield f"data: {json.dumps({**answer, 'part': part})}\n\n"

    return StreamingResponse(parts(), media_type="text/event-stream")


@pytest.fixture
async def world(tokenizer, renderer):
    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    engines = {
        name: ScriptedEngine(lambda _, name=name: encode(f"I am {name}.<|im_end|>"), name=name)
        for name in ("one", "two")
    }
    records = Records()
    async with contextlib.AsyncExitStack() as stack:
        theirs = await stack.enter_async_context(
            Listening(
                Starlette(routes=[Route("/v1/chat/completions", elsewhere, methods=["POST"])]),
                "127.0.0.1",
                0,
            )
        )
        models = Models(
            [
                Policy(name, engine, renderer, frozen=name == "two")
                for name, engine in engines.items()
            ],
            [
                External("judge", f"{theirs.url}/v1", "big", api_key="their-key"),
                External("gone", "http://127.0.0.1:9/v1", "big"),
            ],
            default="one",
            agents=[("plan*", "two"), ("critic", "judge")],
        )
        gateway = Gateway(models, records, SECRET)
        stack.push_async_callback(gateway.aclose)
        server = await stack.enter_async_context(Listening(make_app(gateway), "127.0.0.1", 0))
        made = World(server.url, encode, records, gateway, engines)
        await stack.enter_async_context(made.http)
        yield made


def text_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


# Models ---------------------------------------------------------------------------------------


async def test_each_policy_answers_by_its_name_and_is_recorded_with_it(world):
    for name, said in (("one", "one"), ("two", "two"), ("gpt-4o-mini", "one")):
        assert text_of(await world.post(model=name)) == f"I am {said}."
    assert [call.policy for call in world.records.calls] == ["one", "two", "one"]


async def test_all_models_are_listed(world):
    headers = {"x-api-key": world.key()}
    listed = (await world.http.get(f"{world.url}/v1/models", headers=headers)).json()
    assert [model["id"] for model in listed["data"]] == ["one", "two", "judge", "gone"]


async def test_without_a_default_an_unknown_name_is_refused(renderer):
    engine = ScriptedEngine([])
    policies = [Policy(name, engine, renderer) for name in ("one", "two")]
    gateway, key = (
        Gateway(Models(policies), Records(), SECRET),
        KeyClaims(rollout_id="r", attempt=1, expires=2e9),
    )
    transport = httpx.ASGITransport(make_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        response = await client.post(
            "/v1/chat/completions",
            json={"model": "three", "messages": USER},
            headers={"x-api-key": mint_key(key, SECRET)},
        )
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "one, two" in response.json()["error"]["message"]


async def test_a_model_elsewhere_gets_its_own_key_and_is_recorded_without_tokens(world):
    response = await world.post(model="judge")
    assert response.json() == {"id": "theirs-big", "said": "Bearer their-key"}
    (call,) = world.records.calls
    assert (call.rollout_id, call.policy, call.completion_ids) == ("r", "judge", ())
    assert call.request["model"] == "judge"
    assert call.response["id"] == "theirs-big"


async def test_a_stream_from_elsewhere_is_passed_on_and_recorded(world):
    response = await world.post(model="judge", stream=True)
    assert [event["part"] for event in events_of(response.text)] == ["a", "b"]
    call = await world.records.first()
    assert '"part": "b"' in call.response["text"]


async def test_an_error_from_elsewhere_is_the_client_s_to_see(world):
    response = await world.post(model="judge", messages=[])
    assert (response.status_code, response.headers["retry-after"]) == (422, "7")
    assert world.records.calls[0].finish_reason == "error"


async def test_a_model_that_cannot_be_reached_is_a_bad_gateway(world):
    response = await world.post(model="gone")
    assert response.status_code == 502
    (call,) = world.records.calls
    assert (call.status, call.finish_reason, call.response) == (502, "error", response.json())
    assert "their-key" not in response.text
    assert text_of(await world.post()) == "I am one."


# Agents ---------------------------------------------------------------------------------------


def asking(world, agent, **claims) -> dict[str, str]:
    return {"authorization": f"Bearer {world.key(**claims)}", AGENT: agent}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_with_a_model_of_its_own_gets_it_whatever_it_asks_for(world, path, stream):
    for agent in ("planner", "writer", "plan", ""):
        response = await world.post(path, headers=asking(world, agent), stream=stream)
        assert response.status_code == 200
    answered = [(call.agent, call.policy) for call in world.records.calls]
    assert answered == [("planner", "two"), ("writer", "one"), ("plan", "two"), ("", "one")]


async def test_an_agent_s_model_may_be_elsewhere(world):
    trace = {TRACEPARENT: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    for stream in (False, True):
        await world.post(headers=asking(world, "critic") | trace, stream=stream)
        call = await world.records.first()
        assert (call.agent, call.span_id, call.policy) == ("critic", "00f067aa0ba902b7", "judge")
        assert (call.protocol, call.status, call.completion_ids) == ("chat", 200, ())
        world.records.calls.clear()


async def test_a_frozen_model_samples_as_its_agent_asks(world):
    sampling = Sampling(temperature=0.0, max_tokens=1)
    headers = asking(world, "planner", sampling=sampling)
    response = await world.post(headers=headers, temperature=0.7)
    assert text_of(response) == "I am two."
    assert world.engines["two"].requests[0].temperature == 0.7


async def test_a_conversation_with_one_policy_is_not_continued_from_another_s_tokens(world):
    first = await world.post(headers=asking(world, "writer"))
    more = [*USER, first.json()["choices"][0]["message"], {"role": "user", "content": "and?"}]
    for agent in ("planner", "writer"):
        await world.post(headers=asking(world, agent), messages=more)
    begun, other, own = world.records.calls
    assert (other.parent, other.drift) == (None, None)
    assert own.parent == begun.id


async def test_tokens_are_counted_as_the_agent_s_own_model_counts_them(world, tokenizer):
    class Wordy:
        def __init__(self, renderer):
            self._renderer = renderer

        def render(self, messages, tools, options):
            return self._renderer.render(messages, tools, options) * 2

    models = world.gateway._models
    wordy = Policy("two", world.engines["two"], Wordy(models.policy("one").renderer))  # type: ignore[arg-type]
    models._policies["two"] = wordy
    counts = {}
    for agent in ("writer", "planner"):
        response = await world.http.post(
            f"{world.url}/v1/messages/count_tokens",
            json={"model": "one", "messages": USER},
            headers=asking(world, agent),
        )
        counts[agent] = response.json()["input_tokens"]
    assert counts["planner"] == 2 * counts["writer"]


# Keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_the_key_may_be_a_part_of_the_path(world, path):
    root = f"/key/{world.key('by-path')}/v1"
    response = await world.post(path, root=root, headers={"authorization": "Bearer not-a-key"})
    assert response.status_code == 200
    assert world.records.calls[-1].rollout_id == "by-path"


@pytest.mark.parametrize("path", BODIES)
async def test_keys_of_different_attempts_are_refused(world, path):
    headers = {"authorization": f"Bearer {world.key('a')}", "x-api-key": world.key("b")}
    response = await world.post(path, headers=headers)
    assert response.status_code == 403
    assert "a (attempt 1) and b (attempt 1)" in response.json()["error"]["message"]
    by_path = await world.post(path, root=f"/key/{world.key('c')}/v1")
    assert by_path.status_code == 403
    assert world.records.calls == []


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", ["expired", "foreign", "forged", "somebody else's"])
async def test_a_key_that_does_not_open_is_refused_in_the_protocol_s_form(world, path, kind):
    good = world.key()
    key = {
        "expired": world.key(expires=time.time() - 1),
        "foreign": mint_key(KeyClaims(rollout_id="r", attempt=1, expires=2e9), b"2" * 32),
        "forged": good[:-4] + ("AAAA" if good[-4:] != "AAAA" else "BBBB"),
        "somebody else's": "sk-abc",
    }[kind]
    response = await world.post(path, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 401
    error = response.json()["error"]
    kind_of_error = "authentication_error" if path == "/messages" else "invalid_request_error"
    assert error["type"] == kind_of_error
    assert key not in response.text


# Bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff\xfe{}", b'{"model": "\xc3\x28"}', b"null", b"7"]
)
async def test_a_malformed_body_is_the_client_s_error_and_the_server_goes_on(world, path, body):
    headers = {"authorization": f"Bearer {world.key()}"}
    response = await world.http.post(f"{world.url}/v1{path}", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert (await world.post(path)).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_fifty_megabytes_are_refused_and_the_server_goes_on(world, path):
    headers = {"authorization": f"Bearer {world.key()}"}
    body = b'{"model": "one", "x": "' + b"x" * (50 * 2**20) + b'"}'
    response = await world.http.post(f"{world.url}/v1{path}", content=body, headers=headers)
    assert response.status_code == 413
    assert (await world.post(path)).status_code == 200


# Sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_the_rollout_s_sampling_wins_and_absurd_limits_are_cut(world, path):
    sampling = Sampling(temperature=0.3, top_p=0.5)
    headers = {"authorization": f"Bearer {world.key(sampling=sampling)}"}
    limit = "max_output_tokens" if path == "/responses" else "max_tokens"
    asked = {"temperature": 0.9, "top_p": 0.9, limit: 10**9}
    assert (await world.post(path, headers=headers, **asked)).status_code == 200
    (request,) = world.engines["one"].requests
    assert (request.temperature, request.top_p) == (0.3, 0.5)
    assert request.max_tokens == 4096 - len(request.prompt_ids)
    limited = {"authorization": f"Bearer {world.key(sampling=Sampling(max_tokens=2))}"}
    await world.post(path, headers=limited, **asked)
    assert len(world.records.calls[-1].completion_ids) == 2
    assert world.records.calls[-1].finish_reason == "length"


# Retries, hang-ups and holds ------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_a_retry_marks_the_answer_that_never_arrived_and_samples_the_same(world, path):
    headers = {"authorization": f"Bearer {world.key()}"}
    await world.post(path, headers=headers)
    await world.post(path, headers={**headers, "x-stainless-retry-count": "1"})
    first, second = world.records.calls
    assert world.records.superseded == [first.id]
    seeds = [request.seed for request in world.engines["one"].requests]
    assert seeds[0] == seeds[1]
    await world.post(path, headers=headers)
    assert world.records.superseded == [first.id]
    assert world.engines["one"].requests[2].seed != seeds[0]
    assert second.id != first.id


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_the_sampling_at_the_next_token(world, path, stream):
    engine = world.engines["one"]
    engine.hold()
    asking = asyncio.ensure_future(world.post(path, stream=stream))
    while not engine.requests:
        await asyncio.sleep(0)
    asking.cancel()
    call = await world.records.first()
    assert call.finish_reason == "abort"
    assert call.superseded is not stream  # of a stream it has seen what there was
    assert engine.aborted == [call.id]


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_is_held_while_weights_change_and_told_when_to_come_back(world, path):
    headers = {"authorization": f"Bearer {world.key()}"}
    async with world.gateway.hold():
        waiting = asyncio.ensure_future(world.post(path))
        impatient = {**headers, "x-stainless-read-timeout": "0.004"}
        response = await world.post(path, headers=impatient)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["message"]
        assert not waiting.done()
        assert world.engines["one"].requests == []
    assert (await waiting).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_is_told_in_the_protocol_s_form(world, path, stream):
    def fail(_):
        raise EngineError("out of memory")

    world.engines["one"]._script = fail
    response = await world.post(path, stream=stream)
    assert response.status_code == (200 if stream else 500)
    assert "out of memory" in response.text
    assert "Traceback" not in response.text
    (call,) = world.records.calls
    assert (call.status, call.finish_reason, call.prompt_ids) == (500, "error", ())
    assert "out of memory" in call.response["error"]
