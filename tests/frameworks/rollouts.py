"""Many rollouts of one agent at once: a store, a gateway, and workers in another environment."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

from frameworks.model import script
from fulmen.engine.scripted import ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.gateway.render import make_renderer
from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.records import Rollout, RolloutResult, Task
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from fulmen.store.open import open_store

AGENTS = Path(__file__).resolve().parent / "agents"

SUMS = tuple(f"{number}*7" for number in range(11, 21))
RAISING = ("21/0", "22/0")
"""What makes the tool raise ZeroDivisionError."""


async def run_all(
    folder: Path, python: str, agent: str, expressions: tuple[str, ...], tokenizer: Any
) -> dict[str, RolloutResult]:
    """One rollout for each expression, all at once in two processes; results by expression."""
    store = open_store(folder / "run.db")
    engine = ScriptedEngine(script(tokenizer), max_context=30_000, vocab_size=len(tokenizer))
    models = Models([Policy("m", engine, make_renderer(tokenizer, "qwen3"))], default="m")
    gateway = Gateway(models, store, store.secret)
    store.on_attempt_end(gateway.forget)
    hints: list[str] = []
    rollouts = [_rollout(number, text) for number, text in enumerate(expressions)]
    try:
        await store.enqueue(rollouts)
        async with (
            aclosing(gateway),
            Listening(make_app(gateway), "127.0.0.1", 0) as server,
            Pool(
                store,
                parse_agent(f"{AGENTS}/{agent}"),
                base_url=server.url,
                workers=len(rollouts),
                processes=2,
                python=python,
                trace=hints.append,
            ) as pool,
        ):
            await _until_finished(store, pool, [rollout.id for rollout in rollouts])
        results = await store.results([rollout.id for rollout in rollouts])
    finally:
        await store.close()
        await engine.close()
    assert hints == []
    return dict(zip(expressions, results, strict=True))


def _rollout(number: int, expression: str) -> Rollout:
    task = Task(id=f"t{number}", input={"expression": expression})
    return Rollout(id=f"r{number}", task=task, group="g", step=1, deadline_s=60.0, max_attempts=1)


async def _until_finished(store: Any, pool: Pool, names: list[str]) -> None:
    """Return when all have finished; raise what stops the pool."""
    broken = asyncio.ensure_future(pool.broken())
    waiting = set(names)
    while waiting:
        some = asyncio.ensure_future(store.wait_finished(sorted(waiting), timeout_s=60))
        await asyncio.wait({some, broken}, return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            some.cancel()
            broken.result()
        waiting -= set(some.result())
    broken.cancel()
