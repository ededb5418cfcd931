"""Numbers of single tokens, told apart by the call they belong to."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fulmen.learner.batch import MicroBatch
from fulmen.schema.records import Credited, Transition

CallNumbers = dict[int, Tensor]
"""By `id()` of a credited call, (n,) of its completion tokens."""


@torch.no_grad()
def by_call(batches: Iterable[MicroBatch], numbers: Callable[[MicroBatch], Tensor]) -> CallNumbers:
    """What a function says of the N tokens of each micro-batch, (N,), call by call."""
    found: CallNumbers = {}
    for batch in batches:
        for item, own in zip(batch.items, numbers(batch).split(lengths(batch)), strict=True):
            found[id(item)] = own
    return found


def lengths(batch: MicroBatch) -> list[int]:
    """(M,) how many tokens each call has."""
    return [len(item.transition.completion_ids) for item in batch.items]


def distinct(shares: Iterable[Sequence[Credited]]) -> list[Credited]:
    """The calls of all shares, each once.

    >>> one, two = uncredited([_call(3), _call(4)])
    >>> len(distinct([[one, two], [two], [one, two]]))
    2
    """
    return list({id(item): item for share in shares for item in share}.values())


def uncredited(transitions: Sequence[Transition]) -> list[Credited]:
    """Calls as the learner lays them out, before anything is known of their worth."""
    return [Credited(transition=transition, advantage=0.0) for transition in transitions]


def in_lists(items: Sequence[Credited], numbers: CallNumbers) -> list[list[float]]:
    """One list for each call, in the order given; empty for a call without a completion.

    >>> one, two = uncredited([_call(3), _call()])
    >>> in_lists([two, one], {id(one): torch.tensor([0.5])})
    [[], [0.5]]
    """
    return [numbers[id(item)].tolist() if id(item) in numbers else [] for item in items]


def _call(*completion: int) -> Transition:
    """For examples."""
    return Transition(
        rollout_id="r",
        call_id="c",
        agent="a",
        prompt_ids=(1,),
        completion_ids=completion,
        logprobs=(-1.0,) * len(completion),
        temperature=1.0,
        version=0,
    )
