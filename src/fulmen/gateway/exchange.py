"""Serving one request: prompt, engine, answer, record. Knows neither HTTP nor protocols."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from fulmen.engine.base import Engine, GenerateRequest
from fulmen.gateway import ids
from fulmen.gateway.arrival import Arrival
from fulmen.gateway.attempt import Asked, Attempt, digest
from fulmen.gateway.completion import Completion, TextStream
from fulmen.gateway.conversation import Prompt, Served
from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.render import Answer, ChatRenderer, Message
from fulmen.gateway.request import ModelRequest
from fulmen.schema.codec import pack_tokens
from fulmen.schema.errors import ContextOverflow, EngineError, GrammarError
from fulmen.schema.records import JSON, Call, Sampling


class Recorder(Protocol):
    """Where calls are kept."""

    async def record_calls(self, calls: Sequence[Call]) -> None:
        """Keep calls, soon; raises StoreError if they cannot be."""
        ...

    async def supersede_calls(self, rollout_id: str, attempt: int, ids: Sequence[str]) -> None:
        """Mark calls, kept before, whose answer was never received."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A model that is served."""

    name: str
    engine: Engine
    renderer: ChatRenderer
    frozen: bool = False
    """Never trained: it samples as it is asked, whatever the rollout's own sampling is."""


@dataclass(slots=True)
class Choice:
    """One of a request's completions."""

    call_id: str
    prompt: Prompt
    completion: Completion = field(default_factory=Completion)
    answer: Answer = field(default_factory=lambda: Answer(""))
    tool_call_ids: tuple[str, ...] = ()
    """One for each tool call of the answer."""
    finish_reason: str = "abort"
    """stop, length, tool_calls or abort."""


Piece = tuple[int, str, str]
"""(choice, field, text) of a streamed answer; the field is `content` or `reasoning_content`."""


class Exchange:
    """One request being served. Use `run` for the whole answer, or `stream` for its pieces."""

    def __init__(
        self,
        request: ModelRequest,
        arrival: Arrival,
        attempt: Attempt,
        *,
        policy: Policy,
        recorder: Recorder,
        prefix: str,
    ) -> None:
        """Renders the prompts. Raises RequestRefused if it cannot be served.

        `prefix` begins the response's id: `chatcmpl-`, say.
        """
        self.request = request
        self.attempt = attempt
        self.started = arrival.started
        self.key = ids.mint()
        """The random part of all ids of this exchange."""
        self._arrival = arrival
        self._sampling = Sampling() if policy.frozen else arrival.claims.sampling
        self._policy = policy
        self._recorder = recorder
        self.prompts = render(request, attempt, policy)
        self.choices = [
            Choice(ids.call_id(prefix, self.key, place), self.prompts[place // request.n])
            for place in range(len(self.prompts) * request.n)
        ]
        self._failure: EngineError | None = None
        self._max_tokens = [self._fit(prompt) for prompt in self.prompts]
        self._grammar = self._form()
        digests = tuple(digest(pack_tokens(prompt.ids)) for prompt in self.prompts)
        self._seeds = [(name, attempt.repeat(name)) for name in digests]
        self.asked = Asked(tuple(choice.call_id for choice in self.choices), digests)

    @property
    def id(self) -> str:
        """The response's id."""
        return self.choices[0].call_id

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.completion.ids) for choice in self.choices)

    def token_text(self, token: int) -> str:
        """One token's own text; structural tokens by their spelling."""
        renderer = self._policy.renderer
        return renderer.markers.get(token) or renderer.decode([token])

    @property
    def temperature(self) -> float:
        """The rollout's, else the client's, else 1."""
        return _first(self._sampling.temperature, self.request.temperature, 1.0)

    @property
    def top_p(self) -> float:
        """The rollout's, else the client's, else 1."""
        return _first(self._sampling.top_p, self.request.top_p, 1.0)

    async def run(self) -> None:
        """Sample all choices and record them; what was sampled is recorded on cancellation too."""
        if len(self.choices) > 1:
            async with aclosing(self.stream()) as pieces:
                async for _ in pieces:
                    pass
            return
        try:
            await self._sample(0, self.choices[0], lambda _: None)
        finally:
            await self._conclude()

    async def stream(self) -> AsyncGenerator[Piece, None]:
        """Yield text as it is certain; at the end all choices are complete and recorded."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._sample(place, choice, pieces.put_nowait))
            for place, choice in enumerate(self.choices)
        ]
        running = len(tasks)
        try:
            while running:
                with self.attempt.asking():
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
            await self._conclude()

    async def _conclude(self) -> None:
        """Read and record what was sampled, whatever ended it."""
        for choice in self.choices:
            self._finish(choice)
        await asyncio.shield(self._recorder.record_calls(self._calls()))

    async def _sample(
        self, place: int, choice: Choice, emit: Callable[[Piece | None], None]
    ) -> None:
        """Sample one choice; its text goes to `emit` as it is certain, None at the end."""
        request, completion, renderer = self.request, choice.completion, self._policy.renderer
        reading = None
        if not request.prompts:
            reading = renderer.reading(choice.prompt.ids, request.callable_tools)
        text = TextStream(renderer, request.stop, reading)
        watched = request.stream or bool(request.stop)
        wanted = GenerateRequest(
            id=choice.call_id,
            prompt_ids=choice.prompt.ids,
            max_tokens=self._max_tokens[place // request.n],
            temperature=self.temperature,
            top_p=self.top_p,
            stop_ids=renderer.stop_ids,
            grammar=self._grammar,
            seed=self._seed(place),
            top_logprobs=request.top_logprobs if request.logprobs else 0,
            stream=watched,
        )
        try:
            async with aclosing(self._policy.engine.generate(wanted)) as deltas:
                async for delta in deltas:
                    completion.add(delta)
                    if not watched:
                        continue
                    for name, fresh in text.push(delta.token_ids):
                        emit((place, name, fresh))
                    if text.stopped_at is not None:
                        completion.stopped_at = text.stopped_at
                        completion.finish_reason = "stop"
                        break
        except EngineError as error:
            if not isinstance(error, ContextOverflow):
                self._failure = error
            raise
        finally:
            emit(None)

    def _finish(self, choice: Choice) -> None:
        """Read a completion as an answer, and remember it for the next turn."""
        completion = choice.completion
        choice.answer = answer = self._read(choice)
        place = self.choices.index(choice)
        choice.tool_call_ids = tuple(
            ids.part_id("call_", self.key, place, number)
            for number in range(len(answer.tool_calls))
        )
        choice.finish_reason = completion.finish_reason
        if answer.tool_calls and completion.finish_reason == "stop":
            choice.finish_reason = "tool_calls"
        if completion.ids and completion.finish_reason != "abort":
            self._remember(choice)

    def _read(self, choice: Choice) -> Answer:
        """A completion as an answer: up to the stop string, where one ended it."""
        completion, renderer = choice.completion, self._policy.renderer
        if self.request.prompts:
            text = renderer.decode(completion.ids)
            return Answer(text if completion.stopped_at is None else _before(text, completion))
        answer = renderer.parse(choice.prompt.ids, completion.ids, self.request.callable_tools)
        if completion.stopped_at is None:
            return answer
        return Answer(_before(answer.content, completion).rstrip(), answer.reasoning)

    def _remember(self, choice: Choice) -> None:
        served = Served(choice.call_id, choice.prompt.ids, tuple(choice.completion.ids))
        request, conversation = self.request, self.attempt.conversation(self._policy.name)
        if request.prompts:
            if choice.completion.stopped_at is not None:
                return  # the tokens hold the stop string, the text that the client has does not
            asked = request.prompts[self.choices.index(choice) // request.n]
            before = asked if isinstance(asked, str) else self._policy.renderer.decode(asked)
            conversation.add_raw(served, before + choice.answer.content)
            return
        message = assistant_message(choice)
        conversation.add(served, request.messages, message, request.tools, request.template_options)

    def _calls(self) -> list[Call]:
        if self._failure is not None:
            return [self._failed(choice, self._failure) for choice in self.choices]
        ended = time.time()
        return [
            Call(
                id=choice.call_id,
                rollout_id=self._arrival.claims.rollout_id,
                attempt=self._arrival.claims.attempt,
                index=self._arrival.index,
                choice=place,
                parent=choice.prompt.parent,
                protocol=self.request.protocol,
                agent=self._arrival.agent,
                span_id=self._arrival.span_id,
                policy=self._policy.name,
                prompt_ids=choice.prompt.ids,
                completion_ids=tuple(choice.completion.ids),
                logprobs=tuple(choice.completion.logprobs),
                grammar=self._grammar,
                versions=tuple(choice.completion.versions),
                temperature=self.temperature,
                top_p=self.top_p,
                finish_reason=choice.finish_reason,
                drift=choice.prompt.drift,
                superseded=self.asked.superseded,
                request=dict(self.request.body),
                response=assistant_message(choice),
                started=self.started,
                ended=ended,
            )
            for place, choice in enumerate(self.choices)
        ]

    def _failed(self, choice: Choice, error: EngineError) -> Call:
        """The record of a request that the engine failed in: its agent is not to blame."""
        return self._arrival.call(
            choice.call_id,
            self.request.protocol,
            request=dict(self.request.body),
            response={"error": str(error)},
            status=500,
            policy=self._policy.name,
        )

    def _fit(self, prompt: Prompt) -> int:
        """Tokens that may be sampled: what was asked, what is allowed, and what fits."""
        context = self._policy.engine.info.max_context
        left = context - len(prompt.ids)
        if left < 1:
            raise RequestRefused(
                f"This model's maximum context length is {context} tokens, but the prompt "
                f"has {len(prompt.ids)} tokens",
                param="messages",
                code="context_length_exceeded",
            )
        if not prompt.ids:
            raise RequestRefused("the prompt is empty", param="prompt")
        if self.request.prompts and max(prompt.ids) >= self._policy.engine.info.vocab_size:
            raise RequestRefused("the prompt has a token that the model has not", param="prompt")
        bounds = (left, self.request.max_tokens, self._sampling.max_tokens)
        return min(bound for bound in bounds if bound is not None)

    def _form(self) -> str:
        """The grammar of the answers; empty if they may be anything."""
        request = self.request
        if request.prompts:
            return ""
        try:
            grammar = self._policy.renderer.form.grammar(
                request.output,
                request.callable_tools,
                self.prompts[0].ids,
                parallel=request.parallel_calls,
                withheld=len(request.callable_tools) < len(request.tools),
            )
            if grammar:
                self._policy.engine.check_grammar(grammar)
        except (GrammarError, RecursionError) as error:
            raise RequestRefused(f"the answer cannot be held to its form: {error}") from None
        return grammar

    def _seed(self, place: int) -> int:
        """Depends on the rollout, the prompt, and how often it was asked: not on arrival order."""
        prompt, repeat = self._seeds[place // self.request.n]
        facts = (self._arrival.claims.seed, self.request.seed, prompt, repeat, place)
        return int.from_bytes(digest(repr(facts).encode())[:8], "big")


def render(request: ModelRequest, attempt: Attempt, policy: Policy) -> list[Prompt]:
    """The prompts of a request. Raises RequestRefused if the model's format has no place for it."""
    conversation, renderer = attempt.conversation(policy.name), policy.renderer
    try:
        if request.prompts:
            return [conversation.raw_prompt(renderer, prompt) for prompt in request.prompts]
        return [
            conversation.prompt(renderer, request.messages, request.tools, request.template_options)
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise RequestRefused(f"the messages cannot be rendered: {error}") from error


def assistant_message(choice: Choice) -> dict[str, JSON]:
    """An answer as a message of chat completions, the form in which conversations are kept."""
    answer = choice.answer
    message: Message = {"role": "assistant", "content": answer.content or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call_id, call in zip(choice.tool_call_ids, answer.tool_calls, strict=True)
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message


def _before(text: str, completion: Completion) -> str:
    return text.split(completion.stopped_at or "")[0]


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
