"""`fulmen serve`: a model behind the OpenAI interface, for agents and people."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import aclosing

from fulmen.gateway.app import Gateway
from fulmen.launch.host import hosted
from fulmen.launch.host_orders import HostPlan
from fulmen.launch.others import all_models, check_names, frozen_sources, read_others
from fulmen.launch.policy import main_source
from fulmen.schema.clock import steady_time
from fulmen.schema.config import ServeConfig
from fulmen.schema.keys import KeyClaims, mint_key
from fulmen.schema.records import Call
from fulmen.server.app import make_app
from fulmen.server.eventloop import run
from fulmen.server.http import Listening

_KEY_LIFE_S = 10 * 365 * 86400.0


class _NoRecord:
    """Serving records nothing: there is no rollout that the calls belong to."""

    async def record_calls(self, calls: Sequence[Call]) -> None:
        """Let them go."""

    async def supersede_calls(self, rollout_id: str, attempt: int, ids: Sequence[str]) -> None:
        """There are none."""


def serve(config: ServeConfig, *, ready: Callable[[str, str], None]) -> None:
    """Serve until interrupted; `ready(url, api_key)` is called once requests are accepted.

    Raises:
        FulmenError: the model cannot be served, or the port is taken.
    """
    run(_serve(config, ready))


async def _serve(config: ServeConfig, ready: Callable[[str, str], None]) -> None:
    others = read_others(config.other_models)
    sources = [main_source(config.model)]
    check_names(sources, others)
    secret = secrets.token_bytes(32)
    claims = KeyClaims(
        rollout_id="guest", attempt=1, expires=steady_time() + _KEY_LIFE_S, trained=False
    )
    async with hosted(HostPlan(config, sources, frozen_sources(others))) as host:
        gateway = Gateway(all_models(host.policies, host.frozen, others), _NoRecord(), secret)
        async with (
            aclosing(gateway),
            Listening(make_app(gateway), config.host, config.port) as server,
        ):
            ready(f"{server.url}/v1", mint_key(claims, secret))
            await host.while_there(asyncio.Event().wait())
