"""Everything between an agent and the policy, put together: gateway, server, pool.

The one place where rooms meet. It decides nothing that a setting does not decide.
"""

import functools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from fulmen.credit.rules import Rule
from fulmen.gateway.app import Gateway
from fulmen.launch.elsewhere import Elsewhere, expiring, work_command
from fulmen.launch.host import Host
from fulmen.launch.memory import settled
from fulmen.launch.others import OtherModels, all_models, read_others
from fulmen.launch.record import open_record
from fulmen.runner.agents import load_function, parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.config import RunSettings
from fulmen.schema.records import RolloutResult, Task
from fulmen.schema.role_keys import make_role_keys
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from fulmen.server.store_api import StoreApi
from fulmen.server.traces import traces_routes
from fulmen.store.sql import SqlStore
from fulmen.tracing.export import OtlpExporter, read_headers
from fulmen.trainer.ahead import Hold
from fulmen.trainer.collect import Collector, Judge
from fulmen.trainer.events import Listener, Note
from fulmen.trainer.folder import RunFolder
from fulmen.trainer.grading import AgentErrors, check_grader
from fulmen.trainer.tasks import read_tasks
from fulmen.trainer.weights import Weights


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run is given, read and checked before anything expensive starts."""

    tasks: Sequence[Task]
    val: Sequence[Task]
    judge: Judge
    others: OtherModels
    """Models beside those that are trained."""


def read_inputs(
    settings: RunSettings,
    val: str | None = None,
    errors: AgentErrors | None = None,
    rules: Sequence[Rule] = (),
) -> Inputs:
    """Read tasks and the list of other models, and load the grader.

    `rules` may have weights of their own among the settings' `reward_weights`.

    Raises:
        ConfigError, DataError, AgentError, GraderError: the first thing that is wrong.
    """
    grader = load_function(settings.grader, "grader") if settings.grader else None
    if grader is not None:
        check_grader(grader, settings.grader or "")
    return Inputs(
        tasks=read_tasks(settings.tasks),
        val=read_tasks(val) if val else (),
        judge=Judge(
            grader,
            settings.grader or "",
            errors or AgentErrors(),
            Weights(settings.reward_weights or {}, [rule.reward_name for rule in rules]),
        ),
        others=read_others(settings.other_models),
    )


@dataclass(frozen=True, slots=True)
class Rig:
    """A running system."""

    store: SqlStore
    collector: Collector
    url: str
    """Base URL that agents are given."""
    hold: Hold
    """Lets their requests wait."""
    over: Callable[[], None]
    """To be called when the run has come to its end, and will not go on: workers elsewhere then end
    as well, instead of waiting for it to come back."""


@asynccontextmanager
async def running(
    settings: RunSettings,
    folder: RunFolder,
    host: Host,
    inputs: Inputs,
    listen: Listener,
) -> AsyncIterator[Rig]:
    """Store, gateway, server and pool around the engines; all ended when the context is left, but
    the engines."""
    store = open_record(folder, settings.store)
    keys = make_role_keys(store.secret)
    folder.write_keys(keys)
    try:
        # Whatever ran here before has ended: this process owns the folder.
        await store.expire_leases(now=float("inf"))
        models = all_models(host.policies, host.frozen, inputs.others)
        gateway = Gateway(models, store, store.secret)
        store.on_attempt_end(gateway.forget)
        api = StoreApi(store, keys)
        app = make_app(gateway, [*api.routes(), *traces_routes(store, store.secret)])
        hint = functools.partial(_hint, listen)
        async with (
            aclosing(gateway),
            Listening(app, settings.host, settings.port) as server,
            aclosing(api),
            expiring(store),
            _agents(settings, folder, store, server, listen) as pool,
            _exporter(settings.otlp_endpoint, hint) as export,
        ):
            collector = Collector(store, pool, inputs.judge, listen, export)
            with settled():
                yield Rig(store, collector, server.url, gateway.hold, api.run_is_over)
    finally:
        await store.close()


def _agents(
    settings: RunSettings, folder: RunFolder, store: SqlStore, server: Listening, listen: Listener
) -> Pool | Elsewhere:
    """Those of this machine; with 0 workers, those of others."""
    if settings.workers == 0:
        command = work_command(server.url_elsewhere, settings.agent, folder.worker_key)
        return Elsewhere(store, command, listen)
    return Pool(
        store,
        parse_agent(settings.agent),
        base_url=server.url,
        workers=settings.workers,
        processes=settings.processes,
        trace=functools.partial(_hint, listen) if settings.tracing else None,
    )


def _hint(listen: Listener, text: str) -> None:
    listen(Note(level="info", code="tracing", text=text))


@asynccontextmanager
async def _exporter(
    endpoint: str | None, failed: Callable[[str], None]
) -> AsyncIterator[Callable[[Sequence[RolloutResult]], None]]:
    """What finished rollouts are given to, beside the training."""
    if endpoint is None:
        yield lambda _: None
        return
    headers = read_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    exporter = OtlpExporter(endpoint, headers=headers, failed=failed)
    async with aclosing(exporter):
        yield exporter.export
