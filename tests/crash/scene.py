"""What all processes of a run have to know, and how each opens the store."""

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from fulmen.runner.store_client import StoreClient
from fulmen.schema.config import make_config
from fulmen.schema.records import Rollout, Task
from fulmen.schema.role_keys import RoleKeys
from fulmen.schema.training import TrainConfig
from fulmen.store.base import Store
from fulmen.store.open import open_store
from fulmen.trainer.rollouts import train_rollouts

SECRET = b"crash" * 8
"""Signs rollout keys."""
KEYS = RoleKeys(admin="fulmen-admin-crash", worker="fulmen-worker-crash")
"""Let clients use the store over HTTP."""
WORKERS = 3
"""Processes that hold a pool, each with one process of agents."""
AGENTS = 3
"""That run at once in a pool."""
_START_S = 0.6
TASKS = [Task(id=f"t{n}", input={"n": n}) for n in range(5)]


@dataclass(frozen=True)
class Scene:
    """One run: its place, its addresses, and its chances."""

    kind: str
    folder: Path
    place: str
    """Where the store is: a file or a URL."""
    port: int
    """Of the server process."""
    line_port: int
    """Where workers and trainer reach it; another than `port` if the line is one that breaks."""
    seed: int
    slowness: float = 1.0
    """How many times slower than a machine with nothing else to do this one is: everything lives,
    and is waited for, so much longer, or nothing would ever come to an end."""

    @property
    def lease_s(self) -> float:
        """Of the workers."""
        return 2.0 * self.slowness

    @property
    def url(self) -> str:
        """Of the server, as workers and trainer are given it."""
        return f"http://127.0.0.1:{self.line_port}"

    @property
    def http(self) -> bool:
        """Whether workers and trainer have nothing but HTTP."""
        return self.kind.startswith("http+")

    @property
    def run(self) -> Path:
        """The trainer's folder."""
        return self.folder / "run"

    @property
    def ledgers(self) -> Path:
        """Where agents write down what they did."""
        return self.folder / "ledgers"

    def chance(self, what: str) -> random.Random:
        """A source of chance of its own for each purpose."""
        return random.Random(f"{self.seed}/{self.kind}/{what}")


@contextlib.asynccontextmanager
async def opened(scene: Scene, key: str) -> AsyncIterator[Store]:
    """The store as workers and trainer have it; `key` is for the one over HTTP."""
    store: Store = (
        StoreClient(scene.url, key) if scene.http else open_store(scene.place, secret=SECRET)
    )
    try:
        yield store
    finally:
        await store.close()


def slowness() -> float:
    """Of this machine just now, by what the start of an agent's process takes."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import fulmen.runner.worker"], check=True)
    return max(1.0, (time.monotonic() - began) / _START_S)


def settings() -> TrainConfig:
    """Of the training: small steps, and a checkpoint after every second one."""
    values = {
        "agent": "agent.py:solve",
        "tasks": "tasks.jsonl",
        "model": "scripted",
        "steps": 1_000_000,
        "tasks_per_step": 2,
        "group_size": 4,
        "checkpoint_every": 2,
        "keep_checkpoints": 2,
        "deadline_s": 20.0,
        "max_attempts": 12,
        "agent_error_reward": -1.0,
    }
    return make_config(TrainConfig, values)


def asked_in(step: int) -> list[Rollout]:
    """What a step asks for; of tasks, only their number counts here."""
    config = settings()
    return train_rollouts(config, step, TASKS[: config.tasks_per_step])
