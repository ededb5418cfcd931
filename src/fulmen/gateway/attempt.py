"""What the gateway remembers of one attempt, and of all that are under way."""

import asyncio
import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fulmen.gateway.conversation import Conversation
from fulmen.gateway.render import Message
from fulmen.schema.errors import LeaseLost
from fulmen.schema.keys import KeyClaims
from fulmen.schema.records import JSON

_MOST_ATTEMPTS = 50_000
"""Attempts remembered at once; beyond it the oldest are forgotten and their next call is rendered
anew, which shows as drift. So many that have ended are remembered as well; what comes of older
ones is served, and refused by the store."""


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

    name: str = ""
    """For messages."""
    ended: bool = False
    """It may no longer ask. Set from any thread."""
    responses: dict[str, KeptResponse] = field(default_factory=dict)
    """By id (the responses protocol)."""
    _conversations: dict[str, Conversation] = field(default_factory=dict)
    """By policy: the tokens of one are not those of another."""
    _calls: int = 0
    _repeats: dict[bytes, int] = field(default_factory=dict)
    _asked: dict[bytes, list[Asked]] = field(default_factory=dict)
    """By digest of the body."""
    _serving: set["asyncio.Task[object]"] = field(default_factory=set)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """What the current task does inside is cancelled when the attempt ends.

        Raises:
            LeaseLost: it has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            self.check()
            yield
        except asyncio.CancelledError:
            # Somebody else may have cancelled it as well.
            if self.ended and not task.uncancel():
                self.check()
            raise
        finally:
            self._serving.discard(task)

    def check(self) -> None:
        """Raises LeaseLost if it has ended."""
        if self.ended:
            raise LeaseLost(f"{self.name} has ended; its requests are not served any more")

    def end(self) -> None:
        """Stop what it is asking for, from any thread."""
        self.ended = True
        for task in tuple(self._serving):
            with contextlib.suppress(RuntimeError):  # its loop has ended, and so has the task
                task.get_loop().call_soon_threadsafe(self._stop, task)

    def _stop(self, task: "asyncio.Task[object]") -> None:
        if task in self._serving:
            task.cancel()

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
        self._ended: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, claims: KeyClaims) -> Attempt:
        """The attempt that a key belongs to.

        Raises:
            LeaseLost: it has ended.
        """
        key = (claims.rollout_id, claims.attempt)
        with self._lock:
            attempt = self._by_key.get(key)
            if attempt is None:
                name = f"attempt {claims.attempt} of rollout {claims.rollout_id}"
                attempt = Attempt(name, ended=key in self._ended)
                attempt.check()
                self._by_key[key] = attempt
            self._by_key.move_to_end(key)
            if len(self._by_key) > _MOST_ATTEMPTS:
                self._by_key.popitem(last=False)
        return attempt

    def end(self, rollout_id: str, number: int) -> None:
        """Drop one that has ended, and stop what it is asking for; from any thread."""
        key = (rollout_id, number)
        with self._lock:
            self._ended[key] = None
            if len(self._ended) > _MOST_ATTEMPTS:
                self._ended.popitem(last=False)
            attempt = self._by_key.pop(key, None)
        if attempt is not None:
            attempt.end()


def digest(data: bytes) -> bytes:
    """Sixteen bytes that stand for many."""
    return hashlib.blake2b(data, digest_size=16).digest()
