"""A store behind a real HTTP server, in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeAlias

from starlette.applications import Starlette

from fulmen.runner.store_client import StoreClient
from fulmen.schema.role_keys import make_role_keys
from fulmen.server.http import Listening
from fulmen.server.store_api import StoreApi
from fulmen.store.sql import SqlStore


class ServedClient(StoreClient):
    """A client that knows the store that it asks."""

    def __init__(self, url: str, key: str, behind: SqlStore) -> None:
        super().__init__(url, key)
        self.behind = behind


AnyStore: TypeAlias = SqlStore | ServedClient


@asynccontextmanager
async def served(store: SqlStore) -> AsyncIterator[ServedClient]:
    """An admin's client of the store."""
    keys = make_role_keys(store.secret)
    api = StoreApi(store, keys)
    async with Listening(Starlette(routes=api.routes()), "127.0.0.1", 0) as server, aclosing(api):
        client = ServedClient(server.url, keys.admin, store)
        yield client
        await client.close()


def behind(store: AnyStore) -> SqlStore:
    """The store in this process."""
    return store.behind if isinstance(store, ServedClient) else store


def heard(store: AnyStore) -> Callable[[int], "asyncio.Future[list[tuple[str, int]]]"]:
    """Follow the ends of attempts; a function that waits until so many have been heard of."""
    loop, ends = asyncio.get_running_loop(), list[tuple[str, int]]()
    news = asyncio.Event()

    def note(rollout_id: str, attempt: int) -> None:
        ends.append((rollout_id, attempt))
        loop.call_soon_threadsafe(news.set)

    async def wait(count: int) -> list[tuple[str, int]]:
        while len(ends) < count:
            await news.wait()
            news.clear()
        return ends

    store.on_attempt_end(note)
    return lambda count: asyncio.ensure_future(asyncio.wait_for(wait(count), 30))
