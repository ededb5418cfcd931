"""Rollouts made up for benchmarks: random tokens, as long and as much shared as asked for."""

import math
import random

from fulmen.schema.records import Credited, Transition


def group(
    vocabulary: int,
    *,
    turns: int,
    prompt: int,
    sampled: int,
    observed: int,
    rollouts: int = 8,
    seed: int = 0,
) -> list[Credited]:
    """A group of rollouts with a common prompt; advantages of both signs, one a rollout.

    Each turn samples `sampled` tokens and observes `observed`; its context is all that came before.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(count))

    found, start = [], tokens(prompt)
    for rollout in range(rollouts):
        context, advantage = start, rng.gauss(0, 1)
        for turn in range(turns):
            completion = tokens(sampled)
            transition = Transition(
                rollout_id=str(rollout),
                call_id=f"{rollout}-{turn}",
                agent="agent",
                prompt_ids=context,
                completion_ids=completion,
                logprobs=(-math.log(vocabulary),) * sampled,
                temperature=1.0,
                version=0,
            )
            found.append(Credited(transition=transition, advantage=advantage, group="g"))
            context = context + completion + tokens(observed)
    return found
