"""A gateway called without a socket, and what a client makes of its streams."""

import json
from typing import Any

import httpx

from fulmen.engine.base import Engine
from fulmen.engine.scripted import Script, ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.gateway.render import ChatRenderer, make_renderer
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import Call
from fulmen.server.app import make_app

SECRET = b"s" * 32


class Memory:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.superseded: list[str] = []

    async def record_calls(self, calls):
        self.calls += calls

    async def supersede_calls(self, rollout_id, attempt, ids):  # noqa: ARG002
        self.superseded += ids


class Face:
    """A gateway in front of an engine that gives the replies in order.

    A reply is a text, which then ends its turn, or a list of tokens. The format is Qwen3's, unless
    another renderer is given.
    """

    def __init__(
        self,
        tokenizer: Any,
        *replies: str | list[int],
        max_context: int = 30_000,
        engine: Engine | None = None,
        script: Script | None = None,
        renderer: ChatRenderer | None = None,
    ) -> None:
        self.tokenizer, self.memory = tokenizer, Memory()
        self.model: Any = None
        self.grammars: Any = None
        """Of the engine that was given, for those who want to look behind it."""
        waiting = [r if isinstance(r, list) else self.ids(r + "<|im_end|>") for r in replies]
        reply = script or (lambda _: waiting.pop(0))
        scripted = ScriptedEngine(reply, max_context=max_context, vocab_size=len(tokenizer))
        self.engine = scripted
        """Counts what is asked of it, unless another engine was given."""
        renderer = renderer or make_renderer(tokenizer, "qwen3")
        models = Models([Policy("m", engine or scripted, renderer)])
        self.gateway = Gateway(models, self.memory, SECRET)
        claims = KeyClaims(rollout_id="r", attempt=1, expires=2e9)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(self.gateway), raise_app_exceptions=False),
            base_url="http://gateway",
            headers={"authorization": f"Bearer {mint_key(claims, SECRET)}"},
        )

    @property
    def calls(self) -> list[Call]:
        return self.memory.calls

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def post(self, path: str, /, **body: Any) -> httpx.Response:
        """Ask at a path behind /v1."""
        return await self.client.post(f"/v1{path}", json={"model": "m", **body})

    async def ask(self, path: str, /, **body: Any) -> Any:
        """The decoded answer of a request that is served."""
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, /, **body: Any) -> list[Any]:
        """The decoded events of a streamed answer, `[DONE]` as a text."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        return events_of(response.text)


def events_of(text: str) -> list[Any]:
    """Cut a stream as careless clients do: with `splitlines`."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) if line.startswith("{") else line for line in lines]
