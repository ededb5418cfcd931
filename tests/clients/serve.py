"""A gateway on a socket, for clients that live in other environments.

Prints one line of JSON, `{"base_url": …}`, and serves until its standard input is closed. Beside
the gateway it has two paths for the tests:

    POST /control/key                     a new rollout's name and key
    GET  /control/calls/NAME?at_least=2   its answered calls, as soon as there are that many

What the policy says depends on the last thing that it was told; see `REPLIES`. The model `slow`
says `SLOW_TOKENS` tokens and then nothing more until its client leaves. The model `random` has
random weights, so that nothing but a grammar gives its answers a form.
"""

import asyncio
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from transformers import AutoTokenizer

from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.engine.scripted import ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.gateway.render import make_renderer
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import Call
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from models import tiny_model

BASE = Path(__file__).resolve().parents[2] / "examples" / "calc" / "base"
SECRET = b"only for the tests of the client"
END = "<|im_end|>"
SLOW_TOKENS = 3


def _call(name: str) -> str:
    arguments = {"a": 2, "b": 3}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


HELLO = "Hello, wörld! 你好 👋🏽\u2028done"
"""Letters of one to four bytes, and a line end that careless clients cut streams at."""

REPLIES = {
    "say hello": HELLO,
    "call add": _call("add"),
    "call both": f"I add and multiply.\n{_call('add')}\n{_call('multiply')}",
    "think and call": f"<think>\nI should add.\n</think>\n\n{_call('add')}",
    "think": "<think>\nTwo and two.\n</think>\n\nFour.",
    "json": '{"name": "Ada", "age": 36}',
}
"""What is said to whoever asks for it; the first that is found in the last turn."""


def reply_to(prompt: str) -> str:
    """The reply to a conversation, or to a raw prompt."""
    last = re.split(r"<\|im_start\|>user\n", prompt)[-1]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", last, re.DOTALL)
    if results:
        return f"I see: {', '.join(results)}."
    return next((reply for words, reply in REPLIES.items() if words in last), "What?")


class Memory:
    """Keeps what is recorded of answered requests, and says when something comes.

    Refused ones are left out: some clients try something else first, and are told no.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.superseded: set[str] = set()
        self._changed = asyncio.Condition()

    async def record_calls(self, calls: Sequence[Call]) -> None:
        """See `Recorder`."""
        async with self._changed:
            self.calls += [call for call in calls if call.status < 400]
            self._changed.notify_all()

    async def supersede_calls(
        self,
        rollout_id: str,  # noqa: ARG002
        attempt: int,  # noqa: ARG002
        ids: Sequence[str],
    ) -> None:
        """See `Recorder`."""
        self.superseded.update(ids)

    async def of(self, rollout_id: str, at_least: int) -> list[Call]:
        """A rollout's calls, once there are that many."""

        def mine() -> list[Call]:
            return [call for call in self.calls if call.rollout_id == rollout_id]

        async with self._changed:
            await self._changed.wait_for(lambda: len(mine()) >= at_least)
            return mine()


class Control:
    """The paths for the tests."""

    def __init__(self, memory: Memory, tokenizer: Any) -> None:
        self._memory, self._tokenizer = memory, tokenizer
        self._names = (f"rollout-{number}" for number in itertools.count())

    def routes(self) -> list[Route]:
        """Both."""
        return [
            Route("/control/key", self.key, methods=["POST"]),
            Route("/control/calls/{name}", self.calls),
        ]

    async def key(self, request: Request) -> Response:  # noqa: ARG002
        """A rollout that nobody else has."""
        name = next(self._names)
        claims = KeyClaims(rollout_id=name, attempt=1, expires=time.time() + 3600)
        return JSONResponse({"rollout": name, "key": mint_key(claims, SECRET)})

    async def calls(self, request: Request) -> Response:
        """What was recorded, and its text with all structural tokens."""
        least = int(request.query_params.get("at_least", 1))
        calls = await self._memory.of(request.path_params["name"], least)
        return JSONResponse([self._told(call) for call in calls])

    def _told(self, call: Call) -> dict[str, Any]:
        return {
            "id": call.id,
            "protocol": call.protocol,
            "choice": call.choice,
            "parent": call.parent,
            "drift": call.drift,
            "superseded": call.superseded or call.id in self._memory.superseded,
            "finish_reason": call.finish_reason,
            "prompt_ids": call.prompt_ids,
            "completion_ids": call.completion_ids,
            "prompt": self._tokenizer.decode(call.prompt_ids),
            "completion": self._tokenizer.decode(call.completion_ids),
        }


def random_engine(tokenizer: Any, stop_ids: frozenset[int]) -> LocalEngine:
    """Samples from weights that know nothing."""
    # Another draw of weights may open a <think> block under a grammar and never close it.
    model = tiny_model(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    grammars = GrammarCompiler(tokenizer, len(tokenizer), stop_ids)
    return LocalEngine(model, name="random", max_context=4096, grammars=grammars)


def make_gateway(memory: Memory, tokenizer: Any) -> Gateway:
    """A policy that answers at once, one that does not come to an end, one of random weights."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def begin(_: tuple[int, ...]) -> list[int]:
        slow.step(SLOW_TOKENS)
        return encode("and on and on " * 200)

    quick = ScriptedEngine(
        lambda prompt: encode(reply_to(tokenizer.decode(prompt)) + END), max_context=8192
    )
    slow = ScriptedEngine(begin, max_context=8192)
    slow.hold()
    renderer = make_renderer(tokenizer, "qwen3")
    policies = [
        Policy("m", quick, renderer),
        Policy("slow", slow, renderer),
        Policy("random", random_engine(tokenizer, renderer.stop_ids), renderer),
    ]
    return Gateway(Models(policies, default="m"), memory, SECRET)


async def main() -> None:
    """Serve until standard input ends."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    memory = Memory()
    gateway = make_gateway(memory, tokenizer)
    routes = Control(memory, tokenizer).routes()
    app = Starlette(routes=[*routes, Mount("/", make_app(gateway))])
    async with Listening(app, "127.0.0.1", 0) as server:
        print(json.dumps({"base_url": server.url}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await gateway.aclose()


if __name__ == "__main__":
    asyncio.run(main())
