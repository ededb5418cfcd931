"""A request as it arrived: whose it is, and how it is recorded when no tokens come of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fulmen.schema import headers
from fulmen.schema.keys import KeyClaims
from fulmen.schema.records import JSON, Call


@dataclass(frozen=True, slots=True)
class Arrival:
    """Who asked, when, and as which request of the attempt."""

    claims: KeyClaims
    index: int
    agent: str = ""
    """As the request said; empty: it did not."""
    span_id: str | None = None
    started: float = field(default_factory=time.time)

    def call(
        self,
        name: str,
        path: str,
        *,
        request: JSON,
        response: JSON,
        status: int = 200,
        policy: str = "",
    ) -> Call:
        """The record of a request that got an answer without tokens of ours, on this path."""
        return Call(
            id=name,
            rollout_id=self.claims.rollout_id,
            attempt=self.claims.attempt,
            index=self.index,
            protocol=path.strip("/").partition("/")[0],
            agent=self.agent,
            span_id=self.span_id,
            policy=policy,
            status=status,
            prompt_ids=(),
            completion_ids=(),
            logprobs=(),
            versions=(),
            temperature=1.0,
            top_p=1.0,
            finish_reason="external" if status < 400 else "error",
            request=request,
            response=response,
            started=self.started,
            ended=time.time(),
        )


def arrival_of(given: Mapping[str, str], claims: KeyClaims, index: int) -> Arrival:
    """Read the headers that say who asks."""
    agent = headers.read_agent(given.get(headers.AGENT))
    return Arrival(claims, index, agent, headers.read_span(given.get(headers.TRACEPARENT)))
