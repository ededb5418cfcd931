"""Many rollouts of one agent at once: a store, a gateway, and workers in another environment."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameworks.model import script
from fulmen.engine.base import Delta, GenerateRequest
from fulmen.engine.scripted import ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.gateway.render import make_renderer
from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.records import Retry, Rollout, RolloutResult, Task
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore

AGENTS = Path(__file__).resolve().parent / "agents"

SUMS = tuple(f"{number}*7" for number in range(11, 21))
RAISING = ("21/0", "22/0")
"""What makes the tool raise ZeroDivisionError."""


class Slow(ScriptedEngine):
    """Takes its time before it says anything."""

    delay_s = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """See `Engine.generate`."""
        await asyncio.sleep(self.delay_s)
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta


@dataclass(frozen=True, slots=True)
class Rig:
    """Everything that rollouts need, at work."""

    store: SqlStore
    pool: Pool
    engine: Slow

    async def run(self, rollouts: Sequence[Rollout]) -> list[RolloutResult]:
        """Results, in order; raises what stops the pool."""
        names = [rollout.id for rollout in rollouts]
        await self.store.enqueue(rollouts)
        broken = asyncio.ensure_future(self.pool.broken())
        waiting = set(names)
        while waiting:
            some = asyncio.ensure_future(self.store.wait_finished(sorted(waiting), timeout_s=60))
            await asyncio.wait({some, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                some.cancel()
                broken.result()
            waiting -= set(some.result())
        broken.cancel()
        return await self.store.results(names)


@asynccontextmanager
async def rig(
    folder: Path,
    agent: str,
    tokenizer: Any,
    *,
    workers: int,
    python: str = "",
    trace: Callable[[str], None] | None = None,
) -> AsyncIterator[Rig]:
    """Run an agent of the folder `agents` in one process; `trace` as for `Pool`."""
    store = open_store(folder / "run.db")
    engine = Slow(script(tokenizer), max_context=30_000, vocab_size=len(tokenizer))
    models = Models([Policy("m", engine, make_renderer(tokenizer, "qwen3"))], default="m")
    gateway = Gateway(models, store, store.secret)
    store.on_attempt_end(gateway.forget)
    try:
        async with (
            aclosing(gateway),
            Listening(make_app(gateway), "127.0.0.1", 0) as server,
            Pool(
                store,
                parse_agent(f"{AGENTS}/{agent}", python),
                base_url=server.url,
                workers=workers,
                processes=1,
                trace=trace,
            ) as pool,
        ):
            yield Rig(store, pool, engine)
    finally:
        await store.close()
        await engine.close()


def rollout(name: str, expression: str) -> Rollout:
    """One that works out an expression."""
    task = Task(id=name, input={"expression": expression})
    return Rollout(id=name, task=task, group="g", step=1, deadline_s=60.0, retry=Retry(attempts=1))


async def run_all(
    folder: Path, python: str, agent: str, expressions: Sequence[str], tokenizer: Any
) -> dict[str, RolloutResult]:
    """One rollout for each expression, all at once in one process; results by expression.

    Everything has to be traced: a hint that something is not is an error.
    """
    hints: list[str] = []
    given = [rollout(f"r{number}", text) for number, text in enumerate(expressions)]
    async with rig(
        folder, agent, tokenizer, workers=len(given), python=python, trace=hints.append
    ) as working:
        results = await working.run(given)
    assert hints == []
    return dict(zip(expressions, results, strict=True))
