"""A run whose agents work on other machines."""

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from fulmen.runner.pool import Counters
from fulmen.store.base import Store
from fulmen.trainer.events import Listener, Note

_EXPIRE_S = 5.0
"""A twelfth of a lease."""
_IDLE_LOOKS = 12


def work_command(url: str, agent: str, key_file: Path) -> str:
    """What to type on another machine; the key itself is not in it.

    >>> work_command("http://a:80", "node agent.mjs", Path("/runs/x/worker.key"))
    "fulmen work --server http://a:80 --agent 'node agent.mjs' --key-file /runs/x/worker.key"
    """
    words = ["fulmen", "work", "--server", url, "--agent", agent, "--key-file", str(key_file)]
    return shlex.join(words)


class Elsewhere:
    """In the place of a pool: says how to start workers, and whether any has come."""

    def __init__(
        self,
        store: Store,
        command: str,
        listen: Listener,
        *,
        look_s: float = 5.0,
        idle_looks: int = _IDLE_LOOKS,
    ) -> None:
        """Looks every so many seconds; warns when nobody worked in so many looks in a row."""
        self.counters = Counters()
        self._look_s, self._idle_looks = look_s, idle_looks
        self._store, self._command, self._listen = store, command, listen
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        text = f"no agents here; start some, here or elsewhere: {self._command}"
        self._listen(Note(level="info", code="workers", text=text))
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def broken(self) -> None:
        """Nothing here can break: wait for ever."""
        await asyncio.Event().wait()

    async def _watch(self) -> None:
        """Warn while nobody works; count who does."""
        idle = 0
        while True:
            await asyncio.sleep(self._look_s)
            counts = await self._store.counts()
            self.counters.running = counts["running"]
            idle = idle + 1 if counts["queued"] and not counts["running"] else 0
            if idle == self._idle_looks:
                text = f"{counts['queued']} rollouts wait, and nobody works: {self._command}"
                self._listen(Note(level="warning", code="workers", text=text))


@asynccontextmanager
async def expiring(store: Store, every_s: float = _EXPIRE_S) -> AsyncIterator[None]:
    """Inside the context, leases that are over end, wherever their workers may have been."""

    async def expire() -> None:
        while True:
            await asyncio.sleep(every_s)
            await store.expire_leases()

    task = asyncio.create_task(expire())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
