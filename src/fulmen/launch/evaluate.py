"""`fulmen eval`: measure a model on tasks through the same agent, gateway and grader."""

from fulmen.launch.host import hosted
from fulmen.launch.host_orders import HostPlan
from fulmen.launch.others import check_names, frozen_sources
from fulmen.launch.policy import policy_sources
from fulmen.launch.rig import read_inputs, running
from fulmen.runner.agents import check_agent, parse_agent
from fulmen.schema.config import EvalConfig
from fulmen.server.eventloop import run
from fulmen.trainer.evaluation import measure, samples_of
from fulmen.trainer.events import EvalDone, Listener, Sample
from fulmen.trainer.folder import open_folder
from fulmen.trainer.health import refuse_hopeless


def evaluate(
    config: EvalConfig, *, listen: Listener
) -> tuple[EvalDone, tuple[Sample, ...], tuple[Sample, ...]]:
    """Run every task; returns the summary, some wins and some losses.

    Raises:
        FulmenError: something the user gave cannot be used.
    """
    return run(_evaluate(config, listen))


async def _evaluate(
    config: EvalConfig, listen: Listener
) -> tuple[EvalDone, tuple[Sample, ...], tuple[Sample, ...]]:
    check_agent(parse_agent(config.agent))
    inputs = read_inputs(config)

    sources = policy_sources(config)
    check_names(sources, inputs.others)
    plan = HostPlan(config, sources, frozen_sources(inputs.others))
    folder, _ = open_folder(config.out, "eval", config.if_exists)
    with folder:
        async with (
            hosted(plan) as host,
            running(config, folder, host, inputs, listen) as rig,
        ):
            measuring = measure(
                rig.collector,
                config,
                inputs.tasks,
                step=0,
                temperature=config.temperature,
                samples=config.samples,
            )
            done, graded = await host.while_there(measuring)
            refuse_hopeless(graded)
            rig.over()
        folder.append_metrics({"step": 0, "eval": done.mode, "reward": done.reward})
    return done, samples_of(graded, best=True), samples_of(graded, best=False)
