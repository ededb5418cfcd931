"""What a rule of automatic intermediate rewarding (AIR) says: when, how much, to whom.

A rule is data. What its `when` means is in `fulmen.credit.detect`.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from fulmen.schema.config import Settings

When = Literal[
    "tool_ok",
    "tool_failed",
    "tool_timeout",
    "json_valid",
    "json_invalid",
    "schema_invalid",
    "repeated_call",
    "empty_result",
    "truncated",
    "context_overflow",
    "slow",
    "http_status",
    "predicate",
]
Target = Literal["call", "agent", "rollout"]

OF_TOOLS: frozenset[When] = frozenset(
    {
        "tool_ok",
        "tool_failed",
        "tool_timeout",
        "json_valid",
        "json_invalid",
        "schema_invalid",
        "repeated_call",
        "empty_result",
        "slow",
    }
)
"""What may be narrowed to some tools."""
REFUSED: frozenset[When] = frozenset({"context_overflow", "http_status"})
"""What happens to requests that got no answer, so that there is no call to earn a reward."""

_PARAMETERS: dict[str, frozenset[str]] = {
    "seconds": frozenset({"slow"}),
    "status": frozenset({"http_status"}),
    "min_status": frozenset({"http_status"}),
    "function": frozenset({"predicate"}),
    "of": frozenset({"json_valid", "json_invalid"}),
}
"""Settings that go with some kinds only."""


class Rule(Settings):
    """A small reward for something seen on the way: `Rule(when="tool_failed", weight=-0.2)`."""

    when: When
    """What earns the reward; the table is in docs/credit.md."""
    weight: float = Field(allow_inf_nan=False)
    """The reward each time, below 0 for a penalty."""
    cap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The rule's rewards of one rollout add up to this at most, in size; all shrink alike."""
    target: Target | None = None
    """Who earns it; default: the call (that asked for the tool), or the agent of a request that
    was refused."""
    tool: str | None = None
    """Only tools of this name or pattern (`*`, `?`, `[…]`)."""
    agent: str | None = None
    """Only agents of this name or pattern."""
    name: str = ""
    """Name of the reward; default: that of `when`."""
    of: Literal["arguments", "answer"] | None = None
    """What `json_valid` and `json_invalid` look at; default: the arguments of tool calls."""
    seconds: float | None = Field(default=None, gt=0)
    """Above this, a call (with `tool`: a use of the tool) is slow."""
    status: int | None = None
    """The HTTP status."""
    min_status: int | None = None
    """The lowest HTTP status."""
    function: str | None = None
    """`file.py:name` of a function of a call and its tool uses; True, or a number to multiply the
    weight with, earns the reward."""

    @property
    def reward_name(self) -> str:
        """Under which its rewards are kept and shown."""
        return self.name or self.when

    @property
    def earner(self) -> Target:
        """`target`, or what it is by default."""
        return self.target or ("agent" if self.when in REFUSED else "call")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, kinds in _PARAMETERS.items():
            if getattr(self, name) is not None and self.when not in kinds:
                raise ValueError(f"{name} does not go with when = {self.when!r}")
        if self.tool is not None and (self.when not in OF_TOOLS or self.of == "answer"):
            raise ValueError(f"tool does not go with when = {self.when!r}")
        if self.when == "slow" and self.seconds is None:
            raise ValueError("slow needs seconds")
        if self.when == "predicate" and self.function is None:
            raise ValueError("predicate needs function")
        if self.when == "http_status" and (self.status is None) == (self.min_status is None):
            raise ValueError("http_status needs either status or min_status")
        if self.when in REFUSED and self.target == "call":
            raise ValueError("a refused request has no call to train; target agent or rollout")
        return self
