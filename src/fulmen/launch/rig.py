"""Everything between an agent and the policy, put together: engine, gateway, server, pool.

The one place where rooms meet. It decides nothing that a setting does not decide.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fulmen.engine.model import LoadedModel, load_model
from fulmen.engine.platform import prepare_process
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.gateway.app import Gateway
from fulmen.gateway.exchange import Policy
from fulmen.gateway.models import Models
from fulmen.gateway.render import make_renderer
from fulmen.runner.agents import load_function, parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.config import RunSettings, ServeConfig
from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Task
from fulmen.server.app import make_app
from fulmen.server.http import Listening
from fulmen.store.open import open_store
from fulmen.store.sqlite import SqliteStore
from fulmen.trainer.collect import Collector, Judge
from fulmen.trainer.events import Listener
from fulmen.trainer.folder import RunFolder
from fulmen.trainer.grading import AgentErrors, check_grader
from fulmen.trainer.tasks import read_tasks


def model_threads(threads: int | None) -> int:
    """CPU threads for the model: all cores but one, which the agents and the gateway need."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return threads or max(1, (cores or 1) - 1)


def pick_device(device: str) -> str:
    """The device that `auto` stands for, after checking one that was named.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:160]
        raise ConfigError(f"device {device!r} cannot be used ({reason})") from None
    return device


def load_policy(folder: Path | str, settings: RunSettings | ServeConfig) -> LoadedModel:
    """Load a model, with the process set right for it first."""
    prepare_process(threads=model_threads(settings.threads))
    return load_model(folder, dtype=settings.dtype, device=pick_device(settings.device))


def make_engine(
    policy: LoadedModel, settings: RunSettings | ServeConfig, *, version: int = 0
) -> LocalEngine:
    """Serve a policy from this process."""
    return LocalEngine(
        policy.model,
        name=policy.name,
        max_context=policy.max_context,
        max_batch=settings.max_batch,
        version=version,
    )


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run is given, read and checked before anything expensive starts."""

    tasks: Sequence[Task]
    val: Sequence[Task]
    judge: Judge


def read_inputs(
    settings: RunSettings, val: str | None = None, errors: AgentErrors | None = None
) -> Inputs:
    """Read tasks and load the grader.

    Raises:
        DataError, AgentError, GraderError: the first thing that is wrong.
    """
    grader = load_function(settings.grader, "grader") if settings.grader else None
    if grader is not None:
        check_grader(grader, settings.grader or "")
    return Inputs(
        tasks=read_tasks(settings.tasks),
        val=read_tasks(val) if val else (),
        judge=Judge(grader, settings.grader or "", errors or AgentErrors()),
    )


@dataclass(frozen=True, slots=True)
class Rig:
    """A running system."""

    store: SqliteStore
    collector: Collector
    url: str
    """Base URL that agents are given."""


@asynccontextmanager
async def running(
    settings: RunSettings,
    folder: RunFolder,
    policy: LoadedModel,
    engine: LocalEngine,
    judge: Judge,
    listen: Listener,
) -> AsyncIterator[Rig]:
    """Store, gateway, server and pool around an engine; all ended when the context is left."""
    store = open_store(folder.database)
    try:
        # Whatever ran here before has ended: this process owns the folder.
        await store.expire_leases(now=float("inf"))
        renderer = make_renderer(policy.tokenizer, policy.model.config.model_type)
        models = Models([Policy(policy.name, engine, renderer)])
        gateway = Gateway(models, store, store.secret)
        store.on_attempt_end(gateway.forget)
        async with (
            aclosing(gateway),
            Listening(make_app(gateway), settings.host, settings.port) as server,
            Pool(
                store,
                parse_agent(settings.agent),
                base_url=server.url,
                workers=settings.workers,
                processes=settings.processes,
            ) as pool,
        ):
            yield Rig(store, Collector(store, pool, judge, listen), server.url)
    finally:
        await store.close()
        await engine.close()
