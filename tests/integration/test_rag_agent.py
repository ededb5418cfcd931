"""The RAG example's agent before a gateway whose model is a script."""

import contextlib
import itertools
import json
import time

import openai
import pytest
from transformers import AutoTokenizer

from fulmen.engine.scripted import ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.gateway.render import make_renderer
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from gateways import SECRET, Memory
from rag import RAG, load

pytest.importorskip("agents")
TASK = {"question": "Where was the founder of Bagen born?"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(RAG / "base")


@pytest.fixture
def serving(tokenizer, monkeypatch):
    """A served gateway that the SDK's client leads to; gives what it recorded."""

    @contextlib.asynccontextmanager
    async def serve(*replies: str):
        ids = [
            tokenizer.encode(f"{reply}<|im_end|>", add_special_tokens=False) for reply in replies
        ]
        engine, memory = ScriptedEngine(ids, max_context=4096), Memory()
        policy = Policy("rag", engine, make_renderer(tokenizer, "qwen3"))
        app = make_app(Gateway(Models([policy]), memory, SECRET))
        key = mint_key(KeyClaims(rollout_id="r", attempt=1, expires=time.time() + 60), SECRET)
        async with (
            Listening(app, "127.0.0.1", 0) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client,
        ):
            # The SDK's own is kept from run to run, and belongs to the first one's event loop.
            monkeypatch.setattr("agents.models._openai_shared._default_openai_client", client)
            monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
            yield memory

    return serve


def call(query: str) -> str:
    arguments = json.dumps({"query": query})
    return f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>'


async def test_the_agent_searches_twice_and_every_call_continues_the_one_before(rag, serving):
    async with serving(
        call("founder Bagen"), call("born Yosha"), "<answer> Joton</answer>"
    ) as memory:
        output = await load("agent").solve(TASK)
    assert load("grader").score({"answer": "Joton"}, output)["reward"] == 1.0
    calls = memory.calls
    assert [c.drift for c in calls] == [None, None, None]
    for before, after in itertools.pairwise(calls):
        served = (*before.prompt_ids, *before.completion_ids)
        assert tuple(after.prompt_ids[: len(served)]) == served


async def test_the_warm_start_s_conversations_are_exactly_those_of_the_agent(
    rag, serving, tokenizer
):
    build = load("build_base")
    queries = ("home Bagen", "born Velbin", "married Bagen")
    said = [*map(call, queries), "<answer> Joton</answer>"]
    async with serving(*said) as memory:
        await load("agent").solve(TASK)
    searches = [(query, build.found(load("agent")._index(), query)) for query in queries]
    attempt = build.Attempt(TASK["question"], searches, "Joton")
    last = memory.calls[-1]
    whole = [*last.prompt_ids, *last.completion_ids]
    assert build.Format(tokenizer).conversation(attempt).ids == whole


async def test_a_search_without_a_hit_says_so_and_bad_arguments_do_not_end_the_run(
    rag, serving, tokenizer
):
    nonsense = '<tool_call>\n{"name": "search", "arguments": {"words": 1}}\n</tool_call>'
    async with serving(call("xyzzy"), nonsense, "<answer> Joton</answer>") as memory:
        assert await load("agent").solve(TASK) == "<answer> Joton</answer>"
    prompt = tokenizer.decode(memory.calls[-1].prompt_ids)
    assert "nothing found" in prompt
    assert "error" in prompt.lower()
