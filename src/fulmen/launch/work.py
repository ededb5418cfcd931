"""`fulmen work`: agents of this machine for a run on another."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fulmen.runner.agents import check_agent, parse_agent
from fulmen.runner.pool import Counters, Pool
from fulmen.runner.store_client import StoreClient
from fulmen.schema.config import WorkConfig
from fulmen.schema.errors import ConfigError, FulmenError, RunOver
from fulmen.schema.role_keys import KEY_VARIABLE
from fulmen.server.eventloop import run

_GOODBYE_S = 5.0
"""So long the server has to take what an ending worker still has to say."""


@dataclass(frozen=True, slots=True)
class Worked:
    """What was done, and why no more."""

    counters: Counters
    run_over: bool
    """The run has come to its end; else the user has ended the work."""


def work(config: WorkConfig, *, ready: Callable[[], None], hint: Callable[[str], None]) -> Worked:
    """Work until interrupted, or until the run is over.

    `ready` is called once the server has let this worker in, `hint` with what its user may want to
    know.

    Raises:
        ConfigError: the URL or the key cannot be used.
        AgentError: the agent cannot be run.
        StoreError: the server was away for too long.
    """
    return run(_work(config, ready, hint))


async def _work(
    config: WorkConfig, ready: Callable[[], None], hint: Callable[[str], None]
) -> Worked:
    agent = parse_agent(config.agent)
    check_agent(agent)
    server = _server(config.server)
    store = StoreClient(server, _key(config.key_file), patience_s=config.patience_s)
    pool = Pool(
        store,
        agent,
        base_url=server,
        workers=config.workers,
        processes=config.processes,
        trace=hint if config.tracing else None,
        lease_s=config.lease_s,
    )
    run_over = False
    try:
        await store.heartbeat([])  # is it there, and does it take the key?
        async with pool:
            ready()
            await _until_stopped(pool, store)
    except RunOver:
        run_over = True
    finally:
        with contextlib.suppress(FulmenError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await store.close()
    return Worked(pool.counters, run_over)


async def _until_stopped(pool: Pool, store: StoreClient) -> None:
    """Return on Ctrl-C or SIGTERM; raise what breaks the pool, or RunOver."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    stop = asyncio.ensure_future(stopped.wait())
    ends = [asyncio.ensure_future(store.over()), asyncio.ensure_future(pool.broken())]
    try:
        await asyncio.wait({stop, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            if end.done():
                end.result()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        for task in (stop, *ends):
            task.cancel()
        await asyncio.gather(stop, *ends, return_exceptions=True)


def _server(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number
        usable = False
    if not usable:
        raise ConfigError(
            f"server {url!r} is no URL of the form http://host:port",
            hint="give the one that fulmen train prints",
        )
    return url.rstrip("/").removesuffix("/v1")


def _key(file: str | None) -> str:
    if file is None:
        key, source = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    else:
        source = file
        try:
            key = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{file}: the key cannot be read ({error})", hint="give --key-file"
            ) from None
    if not key.strip() or not key.strip().isascii() or len(key.split()) > 1:
        raise ConfigError(
            f"{source} holds no worker key",
            hint=f"give --key-file, a copy of worker.key in the run's folder, or {KEY_VARIABLE}",
        )
    return key.strip()
