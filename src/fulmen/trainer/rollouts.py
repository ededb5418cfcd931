"""Tasks become rollouts: what a step or an evaluation asks for.

Ids and seeds follow from the run's seed, the step and the place in it, so that asking again after
a crash asks for the same.
"""

import hashlib
from collections.abc import Iterable, Sequence

from fulmen.schema.config import RunSettings
from fulmen.schema.records import Retry, Rollout, Sampling, Split, Task
from fulmen.schema.training import TrainConfig

LONGEST_RETRY_PAUSE_S = 60.0
"""What doubled pauses end at."""


def train_rollouts(
    config: TrainConfig, step: int, tasks: Sequence[Task], *, first: int = 0
) -> list[Rollout]:
    """`group_size` rollouts of each task; the rollouts of one task are one group.

    `first` is the number of the first group, where others of the step were asked before.
    """
    sampling = Sampling(temperature=config.temperature, top_p=1.0, max_tokens=config.max_tokens)
    return [
        _rollout(config, f"{step:06d}-{place:04d}", sample, task, step, "train", sampling)
        for place, task in enumerate(tasks, start=first)
        for sample in range(config.group_size)
    ]


def groups_of(ids: Iterable[str]) -> int:
    """How many groups these rollouts are of: so many tasks were drawn for them.

    >>> groups_of(["000001-0000-000", "000001-0000-001", "000001-0001-000"])
    2
    """
    return len({name.rpartition("-")[0] for name in ids})


def eval_rollouts(
    config: RunSettings, step: int, tasks: Sequence[Task], *, temperature: float, samples: int = 1
) -> list[Rollout]:
    """`samples` rollouts of each task at a temperature; 0 is greedy."""
    sampling = Sampling(temperature=temperature, top_p=1.0, max_tokens=config.max_tokens)
    name = f"eval-{step:06d}-t{temperature:g}"
    return [
        _rollout(config, f"{name}-{place:06d}", sample, task, step, "eval", sampling)
        for place, task in enumerate(tasks)
        for sample in range(samples)
    ]


def _rollout(
    config: RunSettings,
    group: str,
    sample: int,
    task: Task,
    step: int,
    split: Split,
    sampling: Sampling,
) -> Rollout:
    name = f"{group}-{sample:03d}"
    return Rollout(
        id=name,
        task=task,
        group=group,
        step=step,
        split=split,
        seed=seed_of(config.seed, name),
        sampling=sampling,
        deadline_s=config.deadline_s,
        retry=Retry(
            on=config.retry_on,
            attempts=config.max_attempts,
            pause_s=config.retry_pause_s,
            longest_pause_s=max(config.retry_pause_s, LONGEST_RETRY_PAUSE_S),
        ),
    )


def seed_of(seed: int, name: str) -> int:
    """A seed of 63 bits that depends on nothing but its arguments.

    >>> seed_of(0, "000001-0000-000") == seed_of(0, "000001-0000-000") != seed_of(1, "x")
    True
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
