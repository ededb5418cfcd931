"""Which rollouts a step is made of: so many groups, and with dynamic sampling none without signal.

A group whose rewards are all equal teaches a group's baseline nothing, and thins out the others'
lessons. Dynamic sampling leaves it out and asks for another task in its place, until the step is
full or has asked for enough.

Source: DAPO, arXiv 2503.14476, eq. 11. There the constraint is on the share of right answers; here
it is on all rewards of a rollout, final and intermediate, added up, whatever their values. A step
asks for exactly as many groups as are missing, so that nothing is run to be thrown away.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from fulmen.credit.baselines import EQUAL
from fulmen.schema.records import Task
from fulmen.schema.training import TrainConfig
from fulmen.trainer.collect import Collector
from fulmen.trainer.crediting import Crediting, total_rewards
from fulmen.trainer.events import Note
from fulmen.trainer.grading import Graded
from fulmen.trainer.rollouts import train_rollouts


async def collect_step(
    collector: Collector,
    config: TrainConfig,
    step: int,
    tasks: Iterator[Task],
    crediting: Crediting,
) -> list[Graded]:
    """Draw tasks and return all their rollouts, graded, those of left-out groups marked as such.

    Every task drawn is in the result, so that the next step goes on with the next task.

    Args:
        collector: runs the agents.
        config: how many groups, and whether they are replaced.
        step: its number; ids and seeds follow from it.
        tasks: the order of tasks, from where the step before stopped.
        crediting: which rewards rollouts have beside the final one.
    """
    limit = config.tasks_per_step
    if config.dynamic_sampling:
        limit = int(config.max_groups_factor * config.tasks_per_step)
    graded: list[Graded] = []
    asked = full = 0
    while full < config.tasks_per_step and asked < limit:
        drawn = list(islice(tasks, min(config.tasks_per_step - full, limit - asked)))
        rollouts = train_rollouts(config, step, drawn, first=asked)
        found = await collector.collect(rollouts, "collect", step)
        if config.dynamic_sampling:
            found = await asyncio.to_thread(leave_out_equal, found, crediting)
            full += _groups_kept(found)
        else:
            full += len(drawn)
        graded += found
        asked += len(drawn)
    if full < config.tasks_per_step:
        collector.listen(_few(full, asked, config))
    return graded


def leave_out_equal(graded: Sequence[Graded], crediting: Crediting) -> list[Graded]:
    """Mark the rollouts of groups in which the sum of all rewards is the same for all rollouts,
    groups of one reward among them.

    Rollouts without a reward are left as they are: they have reasons of their own.
    """
    totals: dict[str, list[float]] = {}
    for item, total in zip(graded, total_rewards(graded, crediting), strict=True):
        if total is not None:
            totals.setdefault(item.result.rollout.group, []).append(total)
    equal = {group for group, own in totals.items() if np.ptp(own) < EQUAL}
    return [
        replace(item, left_out="equal_rewards")
        if item.reward is not None and item.result.rollout.group in equal
        else item
        for item in graded
    ]


def _groups_kept(graded: Sequence[Graded]) -> int:
    kept = (item for item in graded if item.reward is not None and not item.left_out)
    return len({item.result.rollout.group for item in kept})


def _few(kept: int, asked: int, config: TrainConfig) -> Note:
    text = (
        f"rewards differ in {kept} of {asked} groups, {config.tasks_per_step} were wanted: this "
        "step is made of them; try other tasks, a larger group_size or max_groups_factor"
    )
    return Note(level="warning", code="few-groups", text=text)
