"""`fulmen train`: from settings to a trained model."""

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fulmen.engine.platform import place
from fulmen.launch.air import read_rules
from fulmen.launch.crediting import make_crediting, make_scorers
from fulmen.launch.host import Host, hosted
from fulmen.launch.host_orders import HostPlan
from fulmen.launch.memory import PeakMemory
from fulmen.launch.others import check_names, frozen_sources
from fulmen.launch.policy import PolicySource, check_same_policies, policy_sources
from fulmen.launch.record import open_record
from fulmen.launch.rig import Inputs, read_inputs, running
from fulmen.runner.agents import check_agent, parse_agent
from fulmen.schema.codec import from_msgpack, to_json, to_msgpack
from fulmen.schema.training import TrainConfig
from fulmen.server.eventloop import run
from fulmen.trainer.ahead import Ahead
from fulmen.trainer.evaluation import samples_of
from fulmen.trainer.events import Listener, Note, RunFinished, RunStarted
from fulmen.trainer.figure import draw_rewards
from fulmen.trainer.folder import RunFolder, open_folder
from fulmen.trainer.grading import AgentErrors
from fulmen.trainer.history import History, go_on
from fulmen.trainer.loop import Parts, run_steps
from fulmen.trainer.tasks import kind_of


def train(
    config: TrainConfig,
    *,
    listen: Listener,
    stop: threading.Event | None = None,
    origins: Mapping[str, str] | None = None,
) -> RunFinished:
    """Train an agent's policy and return what came of it.

    Blocks until the last step, or until `stop` is set and the step under way is finished. Of the
    processes that torchrun starts, the first does everything; the others compute with it, and
    return the same.

    Raises:
        FulmenError: something the user gave cannot be used; nothing is lost that was there.
    """
    if place()[0] > 0:
        return _follow(config)
    return run(_train(config, listen, stop or threading.Event(), origins or {}))


def _follow(config: TrainConfig) -> RunFinished:
    # PyTorch and what computes with it are for the processes that do so.
    from fulmen.launch.learners import follow_run
    from fulmen.launch.learning import joined

    with joined(config) as ranks:
        assert ranks is not None, "there is a process before this one"
        return from_msgpack(RunFinished, follow_run(config, ranks))


async def _train(
    config: TrainConfig, listen: Listener, stop: threading.Event, origins: Mapping[str, str]
) -> RunFinished:
    agent = parse_agent(config.agent)
    check_agent(agent)
    errors = AgentErrors(config.on_agent_error, config.agent_error_reward)
    rules = read_rules(config.air)
    inputs = read_inputs(config, config.val, errors, rules)
    sources = policy_sources(config)
    check_names(sources, inputs.others)
    crediting = replace(
        make_crediting(config, rules, inputs.judge.weights),
        policies=[source.name for source in sources],
    )
    if config.task_kind is not None:
        for task in inputs.tasks:
            kind_of(task, config.task_kind)
    folder, resume = open_folder(config.out, _name(config.agent), config.if_exists)
    with folder, PeakMemory() as peak:
        history = await _history(folder, config.store) if resume else History()
        if history.checkpoint is not None:
            check_same_policies(sources, history.checkpoint)
        folder.write_config(config, origins)
        frozen = frozen_sources(inputs.others)
        plan = HostPlan(config, sources, frozen, history.checkpoint)
        async with hosted(plan) as host:
            async with running(config, folder, host, inputs, listen) as rig:
                listen(_started(config, folder, host, inputs, history, rig.url))
                for text in host.why:
                    listen(Note(level="info", code="layout", text=text))
                parts = Parts(
                    config=config,
                    folder=folder,
                    store=rig.store,
                    collector=rig.collector,
                    learners=host.learners,
                    crediting=crediting,
                    train_tasks=inputs.tasks,
                    val_tasks=inputs.val,
                    listen=listen,
                    stop=stop,
                    ahead=Ahead(rig.store, rig.hold),
                    scorers=make_scorers(config, host.learners),
                )
                await host.while_there(run_steps(parts, history))
                if history.step >= config.steps:
                    rig.over()
            finished = _finished(config, folder, sources, history, peak.mb)
            await asyncio.to_thread(host.end, to_msgpack(finished))
    listen(finished)
    return finished


def _started(
    config: TrainConfig,
    folder: RunFolder,
    host: Host,
    inputs: Inputs,
    history: History,
    url: str,
) -> RunStarted:
    return RunStarted(
        run=str(folder.path),
        model=", ".join(policy.source.name for policy in host.policies),
        parameters=host.parameters,
        agent=config.agent,
        train_tasks=len(inputs.tasks),
        val_tasks=len(inputs.val),
        first_step=history.step + 1,
        steps=config.steps,
        rollouts_per_step=config.tasks_per_step * config.group_size,
        gateway=url,
    )


async def _history(folder: RunFolder, place: str | None) -> History:
    """Where an interrupted run stands."""
    store = open_record(folder, place)
    try:
        return await go_on(folder, store)
    finally:
        await store.close()


def _finished(
    config: TrainConfig,
    folder: RunFolder,
    sources: Sequence[PolicySource],
    history: History,
    peak_mb: float,
) -> RunFinished:
    plot = None
    if history.rewards:
        draw_rewards(folder.plot, history.rewards, history.evals)
        plot = str(folder.plot)
    finished = RunFinished(
        run=str(folder.path),
        checkpoint=str(history.checkpoint) if history.checkpoint else None,
        policies={
            source.name: str(history.checkpoint / source.place)
            for source in sources[1:]
            if history.checkpoint
        },
        steps=history.step,
        stopped=history.step < config.steps,
        train_seconds=history.seconds,
        peak_mb=peak_mb,
        evals=tuple(history.evals),
        rewards=tuple(history.rewards),
        won=samples_of(history.last_eval, best=True),
        lost=samples_of(history.last_eval, best=False),
        plot=plot,
    )
    folder.write_summary(to_json(finished))
    return finished


def _name(agent: str) -> str:
    """A short name for the run folder, from the agent's file, module or program."""
    word = next((w for w in agent.split() if "." in w or ":" in w), agent.split()[0])
    stem = os.path.basename(word.partition(":")[0]).partition(".")[0]
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in stem) or "run"
