"""The gateway under test, in a process of its own: real server, renderer and store, no model.

Run by `gateway.py` with one argument, an `Options` as JSON. Prints a line of JSON once it accepts
requests (port and rollout keys) and another after its standard input has ended (what it recorded).
"""

import asyncio
import json
import sqlite3
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]  # whatever imports it fails

from transformers import AutoTokenizer

from fulmen.engine.base import Delta, EngineInfo, GenerateRequest, check_request
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.external import External
from fulmen.gateway.models import Models
from fulmen.gateway.render import make_renderer
from fulmen.schema.records import Rollout, Task
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from fulmen.store.open import open_store
from gateway_process import MODEL, Options

BASE = Path(__file__).resolve().parents[1] / "examples" / "calc" / "base"


class TimedEngine:
    """Says always the same, after a given time."""

    def __init__(self, ids: tuple[int, ...], options: Options) -> None:
        self._ids, self._options = ids, options
        self._whole = Delta(ids, tuple(-0.5 for _ in ids), 0, "stop")
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(MODEL, 32_768, 1 << 16)

    @property
    def version(self) -> int:
        return 0

    def check_grammar(self, grammar: str) -> None:
        """None is asked for."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """The reply in one piece, or token by token for a stream."""
        check_request(request, self.info)
        if not request.stream:
            if self._options.delay_s:
                await asyncio.sleep(self._options.delay_s)
            yield self._whole
            return
        ids = self._ids[:-1] * self._options.repeat + self._ids[-1:]
        clock = asyncio.get_running_loop()
        due = clock.time()
        for place, token in enumerate(ids):
            due += self._options.interval_s
            await asyncio.sleep(max(0.0, due - clock.time()))
            yield Delta((token,), (-0.5,), 0, "stop" if place == len(ids) - 1 else None)

    async def close(self) -> None:
        """There is nothing to release."""


async def serve(options: Options) -> None:
    """Until standard input ends."""
    tokenizer: Any = AutoTokenizer.from_pretrained(BASE)
    ids = tuple(tokenizer.encode(options.reply + "<|im_end|>", add_special_tokens=False))
    policy = Policy(MODEL, TimedEngine(ids, options), make_renderer(tokenizer, "qwen3"))
    elsewhere = [External("external", options.backend, MODEL)] if options.backend else []
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "run.db")
        names = [f"r{number}" for number in range(options.keys)]
        await store.enqueue(
            [Rollout(id=name, task=Task(id=name, input=0), group=name, step=0) for name in names]
        )
        leases = await store.claim("bench", limit=options.keys, lease_s=86_400)
        gateway = Gateway(Models([policy], elsewhere), store, store.secret)
        async with aclosing(gateway), Listening(make_app(gateway), "127.0.0.1", 0) as server:
            _say(port=server.port, keys=[lease.key for lease in leases])
            await asyncio.to_thread(sys.stdin.read)
        await store.close()
        with closing(sqlite3.connect(Path(folder) / "run.db")) as kept:
            query = "SELECT count(*), count(parent) FROM calls"
            calls, continued = kept.execute(query).fetchone()
        _say(calls=calls, continued=continued)


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Options(**json.loads(sys.argv[1]))))
