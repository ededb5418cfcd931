"""Returns of single tokens, where rewards or penalties come token by token.

A trajectory is read as one sequence: the sampled tokens of its trained calls, in order. What lies
between them (prompts, answers of tools, calls that are not trained) is the environment's doing: it
is skipped, and time does not pass in it.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from fulmen.credit.assign import CreditRule
from fulmen.schema.errors import ConfigError, DataError
from fulmen.schema.records import Trajectory

TokenNumbers = Sequence[Sequence[float]]
"""For each transition one number per completion token; none for a transition not trained."""

TokenRule = Callable[[Trajectory, TokenNumbers | None], list[list[float]]]
"""From a trajectory and what is taken off the reward of its tokens to the return of every token."""


def token_rewards(
    trajectory: Trajectory, penalties: TokenNumbers | None = None
) -> list[list[float]]:
    """r_t of every trained token; an empty list for a transition without any.

    A call's own reward comes with its last token, the final one with the last token of all, and
    each token's penalty (β·kl_t, say) is taken off its own. What a call without trained tokens
    earned comes with the last token before it: nothing else the policy did can have led to it.
    Before the first token nothing did, and it goes nowhere.

    >>> from fulmen.credit.assign import example
    >>> token_rewards(example(1.0, [("a", 0.25), ("a", 0.5)]), [[0.125], [0.0]])
    [[0.125], [1.5]]
    """
    rewards: list[list[float]] = []
    waiting = trajectory.reward + trajectory.intermediate
    for place in reversed(range(len(trajectory.transitions))):
        transition = trajectory.transitions[place]
        waiting += transition.reward
        count = len(transition.completion_ids) if transition.trained else 0
        own = [-p for p in penalties[place]] if penalties and count else [0.0] * count
        if own:
            own[-1] += waiting
            waiting = 0.0
        rewards.append(own)
    return rewards[::-1]


def returns_to_go(rewards: Sequence[Sequence[float]], gamma: float) -> list[list[float]]:
    """G_t = Σ_{s≥t} γ^(s−t)·r_s over all tokens, across the borders of calls.

    >>> returns_to_go([[0.0, 1.0], [], [4.0]], 0.5)
    [[1.5, 3.0], [], [4.0]]
    """
    returns: list[list[float]] = []
    later = 0.0
    for own in reversed(rewards):
        found: list[float] = []
        for reward in reversed(own):
            later = reward + gamma * later
            found.append(later)
        returns.append(found[::-1])
    return returns[::-1]


def discounted_tokens(gamma: float) -> TokenRule:
    """G_t of every token, instead of a return for the call: the farther off, the less it counts.

    With γ = 1 and no penalties, all tokens of a call have the return of `reward_to_go`.

    Source: REINFORCE++, arXiv 2501.03262, whose γ is 1.

    Raises:
        ConfigError: `gamma` is not in (0, 1].

    >>> from fulmen.credit.assign import example
    >>> discounted_tokens(0.5)(example(1.0, [("a", 0.0), ("a", 0.0)]), [[0.25], [0.5]])
    [[0.0], [0.5]]
    """
    if not 0 < gamma <= 1:
        raise ConfigError(f"token_discount is {gamma}", hint="give a number above 0, at most 1")

    def rule(trajectory: Trajectory, penalties: TokenNumbers | None) -> list[list[float]]:
        return returns_to_go(token_rewards(trajectory, penalties), gamma)

    return rule


def spread(rule: CreditRule) -> TokenRule:
    """For every token the return of its call, less the penalties from it on: R − Σ_{s≥t} p_s.

    Source: the KL penalty of REINFORCE++, arXiv 2501.03262, beside any credit rule.

    >>> from fulmen.credit.assign import example, identical
    >>> spread(identical)(example(1.0, [("a", 0.0), ("a", 0.0)]), [[0.25], [0.5]])
    [[0.25], [0.5]]
    """

    def each(trajectory: Trajectory, penalties: TokenNumbers | None) -> list[list[float]]:
        found: list[list[float]] = []
        counts = [len(t.completion_ids) if t.trained else 0 for t in trajectory.transitions]
        to_go = returns_to_go(penalties or [[0.0] * count for count in counts], 1.0)
        for value, count, ahead in zip(rule(trajectory), counts, to_go, strict=True):
            found.append([value - ahead[place] for place in range(count)])
        return found

    return each


def by_trajectory(
    trajectories: Sequence[Trajectory], numbers: TokenNumbers, what: str
) -> list[list[Sequence[float]]]:
    """Share out what was computed for all trained transitions, in their order.

    Args:
        trajectories: of a step.
        numbers: one sequence for each trained transition of all trajectories.
        what: their name, for the error.

    Returns:
        For each trajectory its `TokenNumbers`.

    Raises:
        DataError: there are more or fewer sequences than trained transitions, one has not as many
            numbers as the completion has tokens, or a number is NaN or infinite.
    """
    trained = sum(t.trained for trajectory in trajectories for t in trajectory.transitions)
    if len(numbers) != trained:
        raise DataError(f"{what} of {len(numbers)} calls for {trained} trained ones")
    shares: Iterator[Sequence[float]] = iter(numbers)
    result: list[list[Sequence[float]]] = []
    for trajectory in trajectories:
        own: list[Sequence[float]] = []
        for transition in trajectory.transitions:
            found = next(shares) if transition.trained else ()
            tokens = len(transition.completion_ids) if transition.trained else 0
            if len(found) != tokens or not all(map(math.isfinite, found)):
                raise DataError(
                    f"{what} of call {transition.call_id} are {len(found)} numbers, "
                    f"not {tokens} finite ones"
                )
            own.append(found)
        result.append(own)
    return result
