"""What the gateway remembers of one attempt, and of all that are under way."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from fulmen.gateway.conversation import Conversation
from fulmen.gateway.render import Message
from fulmen.schema.keys import KeyClaims
from fulmen.schema.records import JSON

_MOST_ATTEMPTS = 50_000
"""Attempts remembered at once; beyond it the oldest are forgotten and their next call is rendered
anew, which shows as drift."""


@dataclass(slots=True, eq=False)
class Asked:
    """One request of the attempt, for as long as it may be asked again."""

    call_ids: tuple[str, ...]
    prompts: tuple[bytes, ...]
    """Digests of its prompts."""
    superseded: bool = False
    """The client never received the answer."""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """An answer that later requests may refer to instead of repeating it."""

    messages: tuple[Message, ...]
    """All that was said, up to and including the answer."""
    body: dict[str, JSON]


@dataclass(slots=True)
class Attempt:
    """Conversations served, responses kept, requests seen."""

    responses: dict[str, KeptResponse] = field(default_factory=dict)
    """By id (the responses protocol)."""
    _conversations: dict[str, Conversation] = field(default_factory=dict)
    """By policy: the tokens of one are not those of another."""
    _calls: int = 0
    _repeats: dict[bytes, int] = field(default_factory=dict)
    _asked: dict[bytes, list[Asked]] = field(default_factory=dict)
    """By digest of the body."""

    def conversation(self, policy: str) -> Conversation:
        """What this policy has said in the attempt."""
        return self._conversations.setdefault(policy, Conversation())

    def next_index(self) -> int:
        """Number a request in order of arrival: 0, 1, …"""
        self._calls += 1
        return self._calls - 1

    def repeat(self, prompt: bytes) -> int:
        """How often a prompt (its digest) was asked before, not counting what was never received.

        So a request that is sent again after a broken connection samples what the first one did.
        """
        count = self._repeats.get(prompt, 0)
        self._repeats[prompt] = count + 1
        return count

    def item(self, name: str) -> JSON:
        """The output item with this id, from the responses that are kept; None if none has it."""
        for kept in self.responses.values():
            for item in kept.body["output"]:
                if item["id"] == name:
                    return item
        return None

    def begin(self, body: bytes, asked: Asked) -> None:
        """Remember a request by the digest of its body."""
        self._asked.setdefault(body, []).append(asked)

    def lost(self, asked: Asked) -> None:
        """The client hung up on a request before it had an answer."""
        if not asked.superseded:
            asked.superseded = True
            for prompt in asked.prompts:
                self._repeats[prompt] -= 1

    def retried(self, body: bytes) -> Asked | None:
        """The request that a client asks again, saying so; None if its loss is known already."""
        earlier = self._asked.get(body, [])
        if not earlier:
            return None
        known = next((asked for asked in earlier if asked.superseded), None)
        asked = known or earlier[-1]
        earlier.remove(asked)  # each loss explains one retry
        if known is not None:
            return None
        self.lost(asked)
        return asked


class Attempts:
    """The attempts under way."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[tuple[str, int], Attempt] = OrderedDict()

    def of(self, claims: KeyClaims) -> Attempt:
        """The attempt that a key belongs to."""
        key = (claims.rollout_id, claims.attempt)
        attempt = self._by_key.setdefault(key, Attempt())
        self._by_key.move_to_end(key)
        if len(self._by_key) > _MOST_ATTEMPTS:
            self._by_key.popitem(last=False)
        return attempt

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Drop one that has ended."""
        self._by_key.pop((rollout_id, attempt), None)


def digest(data: bytes) -> bytes:
    """Sixteen bytes that stand for many."""
    return hashlib.blake2b(data, digest_size=16).digest()
