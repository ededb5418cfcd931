"""One request inside the engine: its tokens so far and how it is delivered."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Protocol

from fulmen.engine.base import Delta, FinishReason, GenerateRequest
from fulmen.engine.grammar import Mask, Matcher
from fulmen.schema.errors import FulmenError, GrammarError

Event = Delta | FulmenError


class Line(Protocol):
    """Brings what was sampled to those who asked; hashed by where it leads."""

    def send(self, due: list[tuple[Any, Event]]) -> None:
        """Called by the engine's thread, at most once a step: addresses, each with an event."""
        ...


@dataclass(frozen=True, slots=True)
class ToLoop:
    """Brings events to queues that an event loop's coroutines wait at."""

    loop: asyncio.AbstractEventLoop

    def send(self, due: list[tuple["asyncio.Queue[Event]", Event]]) -> None:
        """Wake the loop once. Readers whose loop is closed are gone: nothing to tell them."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_put, due)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """A request being worked on, owned by the engine's thread."""

    request: GenerateRequest
    line: Line
    """Where its events go."""
    address: Any = None
    """Whom the line brings them to."""
    matcher: Matcher | None = None
    """What it must match."""
    adapter: str | None = None
    """Which of several adapters it is sampled with; None: the model as it is."""
    ids: list[int] = field(init=False)
    """Prompt and what was sampled."""
    seed: int = field(init=False)
    cached: int = 0
    """How many leading tokens of `ids` have their keys and values in the slot."""
    aborted: bool = False
    failure: GrammarError | None = None
    """Why it cannot go on."""
    _fresh: list[tuple[int, float, int]] = field(default_factory=list)
    """(id, log-probability, version) sampled but not delivered."""
    _top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt_ids)
        seed = self.request.seed
        self.seed = (random.getrandbits(63) if seed is None else seed) & (2**64 - 1)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - len(self.request.prompt_ids)

    def mask(self) -> Mask | None:
        """The tokens allowed next; None: all. Where there is none, `failure` says so."""
        try:
            return self.matcher.mask() if self.matcher is not None else None
        except GrammarError as error:
            self.failure = error
            return None

    def append(
        self, token: int, logprob: float, version: int, top: tuple[tuple[int, float], ...] | None
    ) -> FinishReason | None:
        """Add a sampled token; says whether and why it was the last.

        Nothing is added to a sequence that cannot go on.
        """
        try:
            if self.matcher is not None and self.failure is None:
                self.matcher.advance(token)
        except GrammarError as error:
            self.failure = error
        if self.failure is not None:
            return None
        self.ids.append(token)
        self._fresh.append((token, logprob, version))
        if top is not None:
            self._top.append(top)
        if token in self.request.stop_ids or (self.matcher is not None and self.matcher.ended):
            return "stop"
        return "length" if self.sampled >= self.request.max_tokens else None

    def take(self, finish: FinishReason | None) -> list[Delta]:
        """What is due for delivery now: all fresh tokens, one delta per policy version."""
        if finish is None and not (self.request.stream and self._fresh):
            return []
        deltas = [self._delta(run) for run in self._runs()]
        self._fresh.clear()
        self._top.clear()
        if finish is not None:
            last = deltas.pop() if deltas else Delta((), (), -1)
            deltas.append(Delta(last.token_ids, last.logprobs, last.version, finish, last.top))
        return deltas

    def _runs(self) -> list[range]:
        """Fresh tokens cut where the version changes."""
        bounds = [0]
        for place in range(1, len(self._fresh)):
            if self._fresh[place][2] != self._fresh[place - 1][2]:
                bounds.append(place)
        bounds.append(len(self._fresh))
        return [range(a, b) for a, b in itertools.pairwise(bounds) if a < b]

    def _delta(self, run: range) -> Delta:
        fresh = [self._fresh[place] for place in run]
        return Delta(
            token_ids=tuple(token for token, _, _ in fresh),
            logprobs=tuple(logprob for _, logprob, _ in fresh),
            version=fresh[0][2],
            top=tuple(self._top[place] for place in run) if self._top else (),
        )


class Deliveries:
    """Collects what an engine step produced and hands it to each line at once."""

    def __init__(self) -> None:
        self._by_line: dict[Line, list[tuple[Any, Event]]] = {}

    def add(self, sequence: Sequence, events: Items[Event]) -> None:
        """Remember events for whoever asked for the sequence."""
        if events:
            due = self._by_line.setdefault(sequence.line, [])
            due.extend((sequence.address, event) for event in events)

    def send(self) -> None:
        """Give every line what is its, and forget it."""
        for line, due in self._by_line.items():
            line.send(due)
        self._by_line.clear()


def _put(due: list[tuple["asyncio.Queue[Event]", Event]]) -> None:
    for queue, event in due:
        queue.put_nowait(event)
