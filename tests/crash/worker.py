"""A worker process: the real pool, with the scripted agent in a process of its own."""

import os
from collections.abc import Callable
from pathlib import Path

from crash.scene import AGENTS, KEYS, Scene, opened
from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool

AGENT = Path(__file__).with_name("agent.py")


async def work(scene: Scene, ready: Callable[[], None]) -> None:
    """Until killed; raises what stops the pool."""
    os.environ["CRASH_LEDGERS"] = str(scene.ledgers)
    async with (
        opened(scene, KEYS.worker) as store,
        Pool(
            store,
            parse_agent(f"{AGENT}:solve"),
            base_url=scene.url,
            workers=AGENTS,
            processes=1,
            trace=lambda text: print(text, flush=True),
            lease_s=scene.lease_s,
        ) as pool,
    ):
        ready()
        await pool.broken()
