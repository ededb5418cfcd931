"""The server process: store, gateway with a scripted engine, and the store over HTTP."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from crash.renderer import END, VOCABULARY, ByteRenderer
from crash.scene import KEYS, SECRET, Scene
from fulmen.engine.scripted import ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.launch.elsewhere import expiring
from fulmen.schema.records import Call
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from fulmen.server.store_api import StoreApi
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore


def _reply(prompt: tuple[int, ...]) -> Iterable[int]:
    text = hashlib.sha256(repr(prompt).encode()).hexdigest()[:12]
    return [*text.encode(), END]


class Sure:
    """Has every call on disk before its agent has the answer.

    Workers that finish attempts in the database itself do not pass by this process, so a call that
    is still on its way to the disk could come too late, or end with this process. Where they go
    through this process, it comes before their result in any case.
    """

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    async def record_calls(self, calls: Sequence[Call]) -> None:
        """Keep calls."""
        await self._store.record_calls(calls)
        await self._store.heartbeat([])  # is done after them

    async def supersede_calls(self, rollout_id: str, attempt: int, ids: Sequence[str]) -> None:
        """Mark calls."""
        await self._store.supersede_calls(rollout_id, attempt, ids)


async def serve(scene: Scene, ready: Callable[[], None]) -> None:
    """Until killed."""
    store = open_store(scene.place, secret=SECRET)
    engine = ScriptedEngine(_reply, max_context=1 << 16, vocab_size=VOCABULARY)
    models = Models([Policy("scripted", engine, ByteRenderer())])
    gateway = Gateway(models, store if scene.http else Sure(store), store.secret)
    # What the gateway knew of attempts ended with the process before.
    await store.expire_leases(now=float("inf"))
    store.on_attempt_end(gateway.forget)
    others = StoreApi(store, KEYS).routes() if scene.http else []
    async with (
        aclosing(gateway),
        Listening(make_app(gateway, others), "127.0.0.1", scene.port),
        expiring(store, scene.lease_s / 12),
    ):
        ready()
        await asyncio.Event().wait()
