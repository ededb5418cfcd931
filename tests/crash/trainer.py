"""The trainer process: Fulmen's own loop, with a learner that only remembers what it learned."""

import asyncio
import json
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

from crash.scene import KEYS, TASKS, Scene, opened, settings
from fulmen.learner.learner import Learner
from fulmen.runner.pool import Counters, Pool
from fulmen.schema.records import Credited
from fulmen.store.base import Store
from fulmen.trainer.ahead import Ahead
from fulmen.trainer.collect import Collector, Judge
from fulmen.trainer.crediting import Crediting
from fulmen.trainer.folder import RunFolder, open_folder
from fulmen.trainer.grading import AgentErrors
from fulmen.trainer.history import go_on
from fulmen.trainer.learners import Learners, Trained
from fulmen.trainer.loop import Parts, run_steps

WEIGHTS = "learned.json"


class Remembering:
    """Its weights are the calls that it has learned from, in order."""

    def __init__(self) -> None:
        self.learned: list[tuple[str, str]] = []
        self.version = 0

    def learn(self, credited: list[Credited]) -> dict[str, float]:
        """Take calls as (rollout, call)."""
        self.learned += [(one.transition.rollout_id, one.transition.call_id) for one in credited]
        self.version += 1
        return {}

    def save(self, folder: Path, *, final: bool) -> None:  # noqa: ARG002
        """Write everything learned so far."""
        weights = {"version": self.version, "learned": self.learned}
        (folder / WEIGHTS).write_text(json.dumps(weights))

    def load(self, folder: Path) -> None:
        """Go back to a checkpoint."""
        weights = json.loads((folder / WEIGHTS).read_text())
        self.version = weights["version"]
        self.learned = [(rollout, call) for rollout, call in weights["learned"]]


class Elsewhere:
    """Stands for the pool, which is in other processes."""

    def __init__(self) -> None:
        self.counters = Counters()

    async def broken(self) -> None:
        """Never: a worker that ends is started again."""
        await asyncio.Event().wait()


async def train(scene: Scene, ready: Callable[[], None]) -> None:
    """Go on from the last checkpoint until told to stop by SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with _folder(scene) as folder:
        async with opened(scene, KEYS.admin) as store:
            ready()
            await _train(folder, store, stop)


def _folder(scene: Scene) -> RunFolder:
    """The run's folder, and whether there is anything to go on with is for the store to say."""
    begun = (scene.run / "store.url").exists()
    if not begun:
        shutil.rmtree(scene.run, ignore_errors=True)
    folder, _ = open_folder(str(scene.run), "run", "resume" if begun else "fail")
    if not begun:
        folder.note_store(scene.place)
    return folder


async def _train(folder: RunFolder, store: Store, stop: threading.Event) -> None:
    learner = Remembering()
    history = await go_on(folder, store)
    if history.checkpoint is not None:
        learner.load(history.checkpoint)
    pool, judge = cast(Pool, Elsewhere()), Judge(None, "", AgentErrors("penalise", -1.0))
    parts = Parts(
        config=settings(),
        folder=folder,
        store=store,
        collector=Collector(store, pool, judge, lambda _: None),
        learners=Learners([Trained("scripted", cast(Learner, learner), lambda _: None)]),
        crediting=Crediting(),
        train_tasks=TASKS,
        val_tasks=(),
        listen=lambda _: None,
        stop=stop,
        ahead=Ahead(store, nullcontext),  # there is no gateway here to hold
    )
    await run_steps(parts, history)
