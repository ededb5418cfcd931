"""An engine that says what a script tells it: for tests, here and in users' projects.

It keeps every promise of `Engine` that can be kept without a model: deltas token by token, stop
ids, token limits, versions, abortion, errors after closing. Nothing in it is random.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fulmen.engine.base import Delta, EngineInfo, FinishReason, GenerateRequest, check_request
from fulmen.schema.errors import EngineError

Script = Callable[[tuple[int, ...]], Iterable[int]]
"""Prompt ids to completion ids."""

LOGPROB = -0.5
"""Log-probability of a reply's first token, nats; the n-th has n times it, so that no two tokens of
a reply can be mistaken for each other."""


class ScriptedEngine:
    """Answers with a function of the prompt, or with given replies in order of arrival.

    `requests` holds every request that came, `aborted` the ids of those whose reader left early.
    With `hold()` no token is handed out until `step()` releases some: a test decides what happens
    between two tokens, without sleeping.
    """

    def __init__(
        self,
        script: Script | Sequence[Sequence[int]],
        *,
        name: str = "scripted",
        max_context: int = 4096,
        vocab_size: int = 1 << 16,
        version: int = 0,
    ) -> None:
        """A list of replies is used up one by one; a request beyond its end is an EngineError."""
        self._script = script if callable(script) else _in_turn(deque(script))
        self._info = EngineInfo(name, max_context, vocab_size)
        self._version = version
        self._closed = False
        self._held = False
        self._released = asyncio.Semaphore(0)
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def version(self) -> int:
        return self._version

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Publish `version` at the end of the context; tokens after it carry it."""
        yield
        self._version = version

    def check_grammar(self, grammar: str) -> None:
        """Any will do: a script says what it says."""

    def hold(self) -> None:
        """Keep every further token back until `step` releases it."""
        self._held = True

    def step(self, tokens: int = 1) -> None:
        """Release that many tokens, to whichever readers wait longest."""
        for _ in range(tokens):
            self._released.release()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Hand out the scripted completion; see `Engine.generate`."""
        check_request(request, self._info)
        self._refuse_if_closed()
        self.requests.append(request)
        finished = False
        kept: list[Delta] = []
        try:
            for delta in self._deltas(request):
                await self._turn()
                kept.append(replace(delta, version=self._version))
                finished = delta.finish_reason is not None
                if request.stream:
                    yield kept.pop()
            for delta in _joined(kept):
                yield delta
        except (GeneratorExit, asyncio.CancelledError):
            if not finished:
                self.aborted.append(request.id)
            raise

    async def close(self) -> None:
        """End what runs with an EngineError."""
        self._closed = True
        self.step(len(self.requests))  # every reader that waits for a token gets to see the end

    def _deltas(self, request: GenerateRequest) -> Iterator[Delta]:
        ids = tuple(self._script(request.prompt_ids))[: request.max_tokens]
        if not ids:
            yield Delta((), (), self._version, "stop")
        for place, token in enumerate(ids):
            reason: FinishReason | None = None
            if token in request.stop_ids or place == len(ids) - 1:
                full = place == request.max_tokens - 1 and token not in request.stop_ids
                reason = "length" if full else "stop"
            logprob = LOGPROB * (place + 1)
            top = (((token, logprob),),) if request.top_logprobs else ()
            yield Delta((token,), (logprob,), self._version, reason, top)
            if reason is not None:
                return

    async def _turn(self) -> None:
        """Wait until a token may be handed out; give other tasks a chance in any case."""
        if self._held:
            await self._released.acquire()
        else:
            await asyncio.sleep(0)
        self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")


def _in_turn(replies: deque[Sequence[int]]) -> Script:
    def script(_prompt: tuple[int, ...]) -> Iterable[int]:
        if not replies:
            raise EngineError("the scripted engine has no reply left")
        return replies.popleft()

    return script


def _joined(deltas: Sequence[Delta]) -> Iterator[Delta]:
    """Neighbours with the same version as one delta."""
    waiting: Delta | None = None
    for delta in deltas:
        if waiting is None:
            waiting = delta
        elif waiting.version == delta.version:
            waiting = Delta(
                waiting.token_ids + delta.token_ids,
                waiting.logprobs + delta.logprobs,
                delta.version,
                delta.finish_reason,
                waiting.top + delta.top,
            )
        else:
            yield waiting
            waiting = delta
    if waiting is not None:
        yield waiting
