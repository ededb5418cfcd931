"""What a token weighs in the loss of an optimiser step: one weight for all tokens of a call.

Σ n_call·weight = 1 for all but `constant`: the loss is a mean of means, and what has no sampled
token is no part of one. n is the number of sampled tokens of what is named, over everything
credited, before a correction leaves anything out. A weight depends on these numbers only, not on
the order of calls or on how they are merged and packed.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from fulmen.schema.errors import ConfigError, DataError
from fulmen.schema.records import Credited, Transition


def token(credited: Sequence[Credited]) -> list[float]:
    """1 / n_all: every token counts alike, long answers more.

    Source: DAPO, arXiv 2503.14476, equation 12, as its code does it over a whole batch; the formula
    itself, over one group, is `group`.

    >>> token(example(("a", "g", 1), ("a", "g", 3)))
    [0.25, 0.25]
    """
    return _mean_of_means(credited, ["all"] * len(credited))


def transition(credited: Sequence[Credited]) -> list[float]:
    """1 / (number of calls · n_call): every call counts alike, rollouts of many calls more.

    What single-turn algorithms do when each call is a sample of theirs.

    >>> transition(example(("a", "g", 1), ("a", "g", 3)))
    [0.5, 0.16666666666666666]
    """
    return _mean_of_means(credited, range(len(credited)))


def rollout(credited: Sequence[Credited]) -> list[float]:
    """1 / (number of rollouts · n_rollout): every rollout counts alike, however long.

    Among failures the long ones are so punished less for each token.

    Source: GRPO, arXiv 2402.03300, equation 3, with all calls of a rollout as one output.

    >>> rollout(example(("a", "g", 1), ("a", "g", 3), ("b", "g", 1)))
    [0.125, 0.125, 0.5]
    """
    return _mean_of_means(credited, [item.transition.rollout_id for item in credited])


def group(credited: Sequence[Credited]) -> list[float]:
    """1 / (number of groups · n_group): every task counts alike; `token` within it.

    Source: DAPO, arXiv 2503.14476, equation 8; "prompt average" in ScaleRL, arXiv 2510.13786.

    Raises:
        DataError: a call does not say which group it belongs to.

    >>> group(example(("a", "g", 1), ("b", "g", 3), ("c", "h", 2)))
    [0.125, 0.125, 0.25]
    """
    nameless = sum(not item.group for item in credited)
    if nameless:
        raise DataError(f"{nameless} of {len(credited)} calls have no group to be averaged over")
    return _mean_of_means(credited, [item.group for item in credited])


def constant(credited: Sequence[Credited], *, tokens: float) -> list[float]:
    """1 / (number of rollouts · tokens): a rollout's sum, in units that never change.

    No length is favoured: each token counts alike, in every step. `tokens` sets the scale of the
    loss only; Dr. GRPO takes the most that a rollout may have. Rollouts without tokens count.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2.

    Raises:
        ConfigError: `tokens` is not above 0.

    >>> constant(example(("a", "g", 1), ("a", "g", 3), ("b", "g", 1)), tokens=8)
    [0.0625, 0.0625, 0.0625]
    """
    if not tokens > 0:
        raise ConfigError(f"constant normaliser of {tokens} tokens", hint="give a number above 0")
    rollouts = len({item.transition.rollout_id for item in credited})
    return [1 / (rollouts * tokens) for _ in credited]


def _mean_of_means(credited: Sequence[Credited], keys: Sequence[Hashable]) -> list[float]:
    """Weights of the mean, over all keys with a token, of the mean over each key's tokens."""
    counts: Counter[Hashable] = Counter()
    for key, item in zip(keys, credited, strict=True):
        counts[key] += len(item.transition.completion_ids)
    present = sum(count > 0 for count in counts.values())
    return [1 / (present * counts[key]) if counts[key] else 0.0 for key in keys]


def example(*calls: tuple[str, str, int]) -> list[Credited]:
    """Calls by rollout, group and number of sampled tokens, for examples."""
    return [
        Credited(
            advantage=1.0,
            group=group,
            transition=Transition(
                rollout_id=rollout,
                call_id=str(place),
                agent="agent",
                prompt_ids=(1,),
                completion_ids=(2,) * count,
                logprobs=(-1.0,) * count,
                temperature=1.0,
                version=0,
            ),
        )
        for place, (rollout, group, count) in enumerate(calls)
    ]
