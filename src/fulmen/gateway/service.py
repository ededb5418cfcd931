"""Serving one request: prompt, engine, answer, record. Knows no HTTP."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from fulmen.engine.base import Engine, GenerateRequest
from fulmen.gateway.chat import ChatRequest, answer_message
from fulmen.gateway.completion import Completion, TextStream
from fulmen.gateway.conversation import Conversation, Prompt, Served
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.render import Answer, ChatRenderer
from fulmen.schema.keys import KeyClaims
from fulmen.schema.records import JSON, Call


class Recorder(Protocol):
    """Where calls are kept."""

    async def record_calls(self, calls: Sequence[Call]) -> None: ...


@dataclass(slots=True)
class Choice:
    """One of a request's completions."""

    call_id: str
    completion: Completion = field(default_factory=Completion)
    message: dict[str, JSON] = field(default_factory=dict)
    finish_reason: str = ""
    """As the client is told: stop, length or tool_calls."""


Piece = tuple[int, str, str]
"""(choice, field, text) of a streamed answer."""


class Exchange:
    """One request being served. Use `run` for the whole answer, or `stream` for its pieces."""

    def __init__(
        self,
        request: ChatRequest,
        claims: KeyClaims,
        conversation: Conversation,
        *,
        engine: Engine,
        renderer: ChatRenderer,
        recorder: Recorder,
    ) -> None:
        """Renders the prompt. Raises RequestRefused if it cannot be served."""
        self.request = request
        self.started = time.time()
        self._claims = claims
        self._conversation = conversation
        self._engine = engine
        self._renderer = renderer
        self._recorder = recorder
        self._index = conversation.next_index()
        try:
            self.prompt: Prompt = conversation.prompt(
                renderer, request.messages, request.tools, request.template_options
            )
        except (ValueError, TypeError, KeyError) as error:
            raise RequestRefused(f"the messages cannot be rendered: {error}") from error
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.choices = [
            Choice(self.id if place == 0 else f"{self.id}-{place}") for place in range(request.n)
        ]
        self._repeat = conversation.repeat(self.prompt.ids)
        self._max_tokens = self._fit()

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.ids)

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.completion.ids) for choice in self.choices)

    def token_text(self, token: int) -> str:
        """One token's own text; structural tokens by their spelling."""
        return self._renderer.markers.get(token) or self._renderer.decode([token])

    @property
    def temperature(self) -> float:
        """The rollout's, else the client's, else 1."""
        return _first(self._claims.sampling.temperature, self.request.temperature, 1.0)

    @property
    def top_p(self) -> float:
        """The rollout's, else the client's, else 1."""
        return _first(self._claims.sampling.top_p, self.request.top_p, 1.0)

    async def run(self) -> None:
        """Sample all choices and record them; what was sampled is recorded on cancellation too."""
        async with aclosing(self.stream()) as pieces:
            async for _ in pieces:
                pass

    async def stream(self) -> AsyncGenerator[Piece, None]:
        """Yield text as it is certain; at the end all choices are complete and recorded."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._sample(place, choice, pieces))
            for place, choice in enumerate(self.choices)
        ]
        running = len(tasks)
        try:
            while running:
                piece = await pieces.get()
                if piece is None:
                    running -= 1
                else:
                    yield piece
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._finish()
            await asyncio.shield(self._recorder.record_calls(self._calls()))

    async def _sample(
        self, place: int, choice: Choice, pieces: "asyncio.Queue[Piece | None]"
    ) -> None:
        request, completion = self.request, choice.completion
        text = TextStream(self._renderer, request.stop, reasoning=self._opens_reasoning())
        watched = request.stream or bool(request.stop)
        wanted = GenerateRequest(
            id=choice.call_id,
            prompt_ids=self.prompt.ids,
            max_tokens=self._max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop_ids=self._renderer.stop_ids,
            seed=self._seed(place),
            top_logprobs=request.top_logprobs if request.logprobs else 0,
            stream=watched,
        )
        try:
            async with aclosing(self._engine.generate(wanted)) as deltas:
                async for delta in deltas:
                    completion.add(delta)
                    if not watched:
                        continue
                    for name, fresh in text.push(delta.token_ids):
                        pieces.put_nowait((place, name, fresh))
                    if text.stopped_at is not None:
                        completion.stopped_at = text.stopped_at
                        completion.finish_reason = "stop"
                        break
        finally:
            pieces.put_nowait(None)

    def _finish(self) -> None:
        """Read every completion as a message, and remember it for the next turn."""
        request = self.request
        for choice in self.choices:
            completion = choice.completion
            answer = self._renderer.parse(self.prompt.ids, completion.ids, request.tools)
            if completion.stopped_at is not None:
                cut = answer.content.split(completion.stopped_at)[0].rstrip()
                answer = Answer(cut, answer.reasoning)
            call_ids = [f"call_{uuid.uuid4().hex[:24]}" for _ in answer.tool_calls]
            choice.message = answer_message(answer, call_ids)
            choice.finish_reason = completion.finish_reason
            if answer.tool_calls and completion.finish_reason == "stop":
                choice.finish_reason = "tool_calls"
            if completion.ids and completion.finish_reason != "abort":
                served = Served(choice.call_id, self.prompt.ids, tuple(completion.ids))
                self._conversation.add(
                    served,
                    request.messages,
                    choice.message,
                    request.tools,
                    request.template_options,
                )

    def _calls(self) -> list[Call]:
        ended = time.time()
        return [
            Call(
                id=choice.call_id,
                rollout_id=self._claims.rollout_id,
                attempt=self._claims.attempt,
                index=self._index,
                choice=place,
                parent=self.prompt.parent,
                protocol="chat",
                prompt_ids=self.prompt.ids,
                completion_ids=tuple(choice.completion.ids),
                logprobs=tuple(choice.completion.logprobs),
                versions=tuple(choice.completion.versions),
                temperature=self.temperature,
                top_p=self.top_p,
                finish_reason=choice.finish_reason,
                drift=self.prompt.drift,
                request=dict(self.request.body),
                response=choice.message,
                started=self.started,
                ended=ended,
            )
            for place, choice in enumerate(self.choices)
        ]

    def _fit(self) -> int:
        """Tokens that may be sampled: what was asked, what is allowed, and what fits."""
        context = self._engine.info.max_context
        left = context - len(self.prompt.ids)
        if left < 1:
            raise RequestRefused(
                f"This model's maximum context length is {context} tokens, but the messages "
                f"have {len(self.prompt.ids)} tokens",
                param="messages",
                code="context_length_exceeded",
            )
        bounds = (left, self.request.max_tokens, self._claims.sampling.max_tokens)
        return min(bound for bound in bounds if bound is not None)

    def _seed(self, place: int) -> int:
        """Depends on the rollout, the prompt, and how often it was asked: not on arrival order."""
        facts = (self._claims.seed, self.request.seed, self.prompt.ids, self._repeat, place)
        return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "big")

    def _opens_reasoning(self) -> bool:
        """Whether the prompt ends inside an open reasoning block, as some templates leave it."""
        markers = self._renderer.markers
        last = next((markers[i] for i in reversed(self.prompt.ids) if i in markers), None)
        return last == "<think>"


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
