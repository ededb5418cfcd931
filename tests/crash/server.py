"""The server process: store, gateway with a scripted engine, and the store over HTTP."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from contextlib import aclosing

from crash.renderer import END, VOCABULARY, ByteRenderer
from crash.scene import KEYS, SECRET, Scene
from fulmen.engine.scripted import ScriptedEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from fulmen.server.store_api import StoreApi
from fulmen.store.open import open_store


def _reply(prompt: tuple[int, ...]) -> Iterable[int]:
    text = hashlib.sha256(repr(prompt).encode()).hexdigest()[:12]
    return [*text.encode(), END]


async def serve(scene: Scene, ready: Callable[[], None]) -> None:
    """Until killed."""
    store = open_store(scene.place, secret=SECRET)
    engine = ScriptedEngine(_reply, max_context=1 << 16, vocab_size=VOCABULARY)
    gateway = Gateway(Models([Policy("scripted", engine, ByteRenderer())]), store, store.secret)
    store.on_attempt_end(gateway.forget)
    others = StoreApi(store, KEYS).routes() if scene.http else []
    async with aclosing(gateway), Listening(make_app(gateway, others), "127.0.0.1", scene.port):
        ready()
        await asyncio.Event().wait()
