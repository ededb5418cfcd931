"""Whitening: advantages of a step shifted and scaled to mean 0 and deviation 1, over tokens.

It comes after the credit rule and changes nothing about who earned what. A call counts as often as
it has sampled tokens, so how a rollout is cut into calls does not matter; calls that are not
trained do not count.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import structs

from fulmen.credit.baselines import EQUAL, Numbers
from fulmen.schema.records import Credited

Whitening = Callable[[Sequence[Credited]], list[Credited]]


def whiten(values: Numbers, weights: Numbers) -> Numbers:
    """(A − mean) / std, both over the values, each counted `weights` times.

    The deviation is the population's. Values that are all equal become 0, as in a group.

    Args:
        values: (N,) advantages.
        weights: (N,) ≥ 0; how many tokens have this advantage.

    Returns:
        (N,) float64 with weighted mean 0 and weighted deviation 1, or all 0.

    >>> whiten(np.array([2.0, 0.0]), np.array([1.0, 3.0])).round(3).tolist()
    [1.732, -0.577]
    """
    counted = values[weights > 0]
    if not len(counted) or np.ptp(counted) < EQUAL:
        return np.zeros_like(values)
    centred = values - np.average(values, weights=weights)
    return centred / np.sqrt(np.average(centred**2, weights=weights))


def as_it_is(credited: Sequence[Credited]) -> list[Credited]:
    """No whitening."""
    return list(credited)


def over_batch(credited: Sequence[Credited]) -> list[Credited]:
    """Over all sampled tokens of the step.

    Source: REINFORCE++, arXiv 2501.03262 ("global advantage normalization"); usual in PPO.
    """
    return _within(credited, [""] * len(credited))


def over_kinds(credited: Sequence[Credited]) -> list[Credited]:
    """Over the sampled tokens of each kind of task, so that none outweighs another by the size of
    its rewards.

    Source: task advantage normalisation of AgentRL, arXiv 2510.04206, whose "task" is our kind of
    task: it trains on several environments at once.
    """
    return _within(credited, [item.kind for item in credited])


def _within(credited: Sequence[Credited], names: Sequence[str]) -> list[Credited]:
    """Whiten what has equal names together."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    result = list(credited)
    for members in places.values():
        own = [credited[place] for place in members]
        values = np.array([value for item in own for value in _values(item)])
        weights = np.array([weight for item in own for weight in _weights(item)])
        white = iter(whiten(values, weights).tolist())
        for place, item in zip(members, own, strict=True):
            result[place] = _with_values(item, [next(white) for _ in _values(item)])
    return result


def _values(item: Credited) -> tuple[float, ...]:
    """One for each token where they differ, else the one of the call."""
    return item.token_advantages or (item.advantage,)


def _weights(item: Credited) -> tuple[float, ...]:
    if item.token_advantages:
        return (1.0,) * len(item.token_advantages)
    return (float(len(item.transition.completion_ids)),)


def _with_values(item: Credited, values: list[float]) -> Credited:
    if item.token_advantages:
        return structs.replace(
            item, advantage=float(np.mean(values)), token_advantages=tuple(values)
        )
    return structs.replace(item, advantage=values[0])
