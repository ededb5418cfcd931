"""Measure the policy on held-out tasks, through the same agent, gateway and grader as training."""

from collections import Counter
from collections.abc import Sequence

from fulmen.schema.config import RunSettings
from fulmen.schema.records import Task
from fulmen.trainer.collect import Collector, Stopwatch
from fulmen.trainer.conversation import messages_of
from fulmen.trainer.events import EvalDone, Sample
from fulmen.trainer.grading import Graded
from fulmen.trainer.health import failure_notes
from fulmen.trainer.rollouts import eval_rollouts
from fulmen.trainer.statistics import mean_interval, success_rate


async def measure(
    collector: Collector,
    config: RunSettings,
    tasks: Sequence[Task],
    *,
    step: int,
    temperature: float,
    samples: int = 1,
) -> tuple[EvalDone, list[Graded]]:
    """Run every task `samples` times at a temperature (0: greedy); the summary and all rollouts."""
    watch = Stopwatch()
    rollouts = eval_rollouts(config, step, tasks, temperature=temperature, samples=samples)
    graded = await collector.collect(rollouts, "eval", step)
    rewards = [item.reward for item in graded if item.reward is not None]
    mean, low, high = mean_interval(rewards)
    done = EvalDone(
        step=step,
        mode="greedy" if temperature == 0 else "sampled",
        rollouts=len(rewards),
        reward=mean,
        low=low,
        high=high,
        success=success_rate(rewards),
        excluded=len(graded) - len(rewards),
        reasons=dict(Counter(item.excluded for item in graded if item.excluded)),
        seconds=watch.seconds,
    )
    collector.listen(done)
    for note in failure_notes(graded):
        collector.listen(note)
    return done, graded


def samples_of(graded: Sequence[Graded], *, best: bool, count: int = 3) -> tuple[Sample, ...]:
    """A few of the best or of the worst rollouts, for people to read; only clear wins or losses."""
    scored = [(item.reward, item) for item in graded if item.reward is not None]
    chosen = sorted(scored, key=lambda pair: -pair[0] if best else pair[0])[:count]
    return tuple(
        Sample(
            task=item.result.rollout.task.for_grader(),
            output=item.result.outcome.output,
            reward=reward,
            messages=tuple(messages_of(item.result)),
        )
        for reward, item in chosen
        if (reward >= 0.5) == best
    )
