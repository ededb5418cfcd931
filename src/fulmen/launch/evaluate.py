"""`fulmen eval`: measure a model on tasks through the same agent, gateway and grader."""

from collections.abc import Sequence

from fulmen.launch.policy import (
    PolicySource,
    ServedPolicy,
    policy_sources,
    serve_policy,
    served_policies,
)
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

    def serve(sources: Sequence[PolicySource]) -> list[ServedPolicy]:
        return [serve_policy(source, config) for source in sources]

    folder, _ = open_folder(config.out, "eval", config.if_exists)
    with folder:
        async with (
            served_policies(policy_sources(config), serve) as policies,
            running(config, folder, policies, inputs, listen) as rig,
        ):
            done, graded = await measure(
                rig.collector,
                config,
                inputs.tasks,
                step=0,
                temperature=config.temperature,
                samples=config.samples,
            )
            refuse_hopeless(graded)
            rig.over()
        folder.append_metrics({"step": 0, "eval": done.mode, "reward": done.reward})
    return done, samples_of(graded, best=True), samples_of(graded, best=False)
