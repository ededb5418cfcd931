"""Over-long rollouts lose reward before they are cut off, so that the limit is no cliff."""

from dataclasses import dataclass

from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Trajectory


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft over-long punishment, added to the final reward before the baseline.

    0 up to L − C tokens, then falling in a line to −1 at L tokens, −1 above; times `weight`.

    DAPO's answers are one completion each. An agent's rollout is many, and what costs time is all
    of them: the length here is the number of tokens the policy sampled in the rollout's trained
    calls. Prompts, which repeat what was said, do not count.

    Source: DAPO, arXiv 2503.14476, eq. 13.

    Raises:
        ConfigError: `buffer` is longer than `limit`.

    >>> punish = Overlong(limit=10, buffer=4)
    >>> [punish.of_length(tokens) for tokens in (6, 7, 10, 99)]
    [0.0, -0.25, -1.0, -1.0]
    """

    limit: int
    """L, tokens."""
    buffer: int
    """C, tokens: where the punishment begins, before the limit."""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.buffer <= self.limit:
            raise ConfigError(
                f"overlong_buffer is {self.buffer} and overlong_tokens {self.limit}",
                hint="the buffer is the last part of the limit: give it fewer tokens",
            )

    def __call__(self, trajectory: Trajectory) -> float:
        """At most 0."""
        return self.of_length(
            sum(len(t.completion_ids) for t in trajectory.transitions if t.trained)
        )

    def of_length(self, tokens: int) -> float:
        """At most 0, for so many sampled tokens."""
        beyond = tokens - (self.limit - self.buffer)
        if beyond <= 0:
            return 0.0
        return -self.weight * min(1.0, beyond / self.buffer if self.buffer else 1.0)
