"""An engine in this process: continuous batching over weights that the learner shares.

One thread works in steps. A step admits waiting requests (a wave is prefilled together), then
decodes one token for every sequence. Requests join and leave at any step.

What is repeatable: a request's random numbers depend on its seed alone, so with the same weights it
samples the same tokens alone or in company, up to the rounding of sums. Measured in float32 on an
AMD CPU with `dense`: 48 of 48 completions had the same tokens alone and among 48, 45 of them also
bitwise the same log-probabilities, the rest within 1e-6 (prefill of another width sums in another
order). Bit for bit the same is promised only for the same batches, as one agent at a time makes
them.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fulmen.engine.base import Delta, EngineInfo, FinishReason, GenerateRequest, check_request
from fulmen.engine.grammar import GrammarCompiler, Matcher
from fulmen.engine.pytorch.attention import prepare
from fulmen.engine.pytorch.batch import Batch, Sampled
from fulmen.engine.pytorch.prefix import BlockKey
from fulmen.engine.pytorch.sequence import Deliveries, Sequence
from fulmen.schema.errors import EngineError, FulmenError, GrammarError

_PREFILL_TOKENS = 4096
"""Positions in one forward pass of prefill: larger ones lose the processor's cache."""
_PREFIX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Stats:
    """What the engine has done so far."""

    prefilled_tokens: int
    """Prompt tokens computed."""
    reused_tokens: int
    """Prompt tokens whose keys and values were known already."""
    sampled_tokens: int
    running: int
    waiting: int


class LocalEngine:
    """Serves a Hugging Face model; safe to use from several event loops and threads."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        max_context: int,
        max_batch: int = 256,
        version: int = 0,
        prefix_bytes: int = _PREFIX_BYTES,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Raises ModelError if the model's family cannot be served.

        Without `grammars` it samples freely only.
        """
        prepare(model)
        self._info = EngineInfo(name, max_context, model.config.get_text_config().vocab_size)
        self._version = version
        self._grammars = grammars
        self._batch = Batch(model, max_batch=max_batch, prefix_bytes=prefix_bytes)
        self._waiting: deque[Sequence] = deque()
        self._sampled_tokens = 0
        self._changed = threading.Condition()
        self._arrived: deque[Sequence] = deque()
        self._updates = 0
        """Updates that wait or are under way; the thread keeps still meanwhile."""
        self._stepping = False
        self._closed = False
        self._failure: str = ""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def version(self) -> int:
        return self._version

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return Stats(
            self._batch.prefilled_tokens,
            self._batch.reused_tokens,
            self._sampled_tokens,
            len(self._batch.sequences),
            len(self._waiting) + len(self._arrived),
        )

    def check_grammar(self, grammar: str) -> None:
        """Compile it, for `generate` to use; see `Engine.check_grammar`."""
        self._matcher(grammar)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Sample one completion; see `Engine.generate`."""
        check_request(request, self._info)
        matcher = self._matcher(request.grammar) if request.grammar else None
        sequence = Sequence(request, asyncio.get_running_loop(), matcher)
        with self._changed:
            if self._closed:
                raise EngineError(self._failure or "the engine is closed")
            self._arrived.append(sequence)
            self._changed.notify_all()
        try:
            while True:
                event = await sequence.queue.get()
                if isinstance(event, FulmenError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            sequence.aborted = True

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Hold the engine between two steps while the weights change; then publish `version`.

        Requests under way go on after it: their keys and values are computed anew under the new
        weights, and their tokens say which version sampled them. If the context is left by an
        exception, the weights may be of no version at all: the engine then ends with an error.
        """
        with self._changed:
            self._updates += 1
            self._changed.wait_for(lambda: not self._stepping)
        try:
            yield
            with self._changed:
                self._version = version
                self._waiting.extendleft(reversed(self._batch.forget()))
        except BaseException:
            with self._changed:
                self._failure = "an update of the weights failed half-way"
                self._closed = True
            raise
        finally:
            with self._changed:
                self._updates -= 1
                self._changed.notify_all()

    async def close(self) -> None:
        """End what runs with an EngineError, and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join)

    def _matcher(self, grammar: str) -> Matcher:
        if self._grammars is None:
            raise GrammarError("this engine samples freely only; answers cannot be given a form")
        return self._grammars.start(grammar)

    def _work(self) -> None:
        try:
            with torch.no_grad():
                while self._next_turn():
                    self._step()
        except Exception as error:
            self._failure = f"the engine failed ({type(error).__name__}: {error})"
        finally:
            self._end_all()

    def _next_turn(self) -> bool:
        """Wait until there is work and nobody changes the weights; False when closed."""
        with self._changed:
            self._stepping = False
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or (
                        not self._updates
                        and bool(self._arrived or self._waiting or self._batch.sequences)
                    )
                )
            )
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            self._stepping = not self._closed
            return self._stepping

    def _step(self) -> None:
        deliveries = Deliveries()
        self._drop_aborted(deliveries)
        if wave := self._admit():
            self._take(wave, self._batch.prefill(wave, _PREFILL_TOKENS), deliveries)
        elif self._batch.sequences:
            self._take(list(self._batch.sequences), self._batch.decode(), deliveries)
        deliveries.send()

    def _admit(self) -> list[Sequence]:
        """Waiting requests to prefill now, oldest first, within the bounds of batch and pass.

        One that would compute the same next block as another of this wave waits for the next wave,
        where it finds that block: a group's prompt is computed once. One so much shorter or longer
        than the others that most of the pass would be padding waits, too; being first, it leads
        the next wave.
        """
        room = self._batch.max_batch - len(self._batch.sequences)
        wave: list[Sequence] = []
        put_back: list[Sequence] = []
        blocks: set[BlockKey] = set()
        widest = total = 0
        while self._waiting and len(wave) < room:
            sequence = self._waiting.popleft()
            missing = self._batch.missing_block(sequence)
            if missing is not None and missing in blocks:
                put_back.append(sequence)
                continue
            own = self._batch.uncached(sequence)
            columns = max(widest, own) * (len(wave) + 1)
            if wave and columns > _PREFILL_TOKENS:
                put_back.append(sequence)
                break
            if columns > 2 * (total + own):
                put_back.append(sequence)
                continue
            wave.append(sequence)
            widest, total = max(widest, own), total + own
            if missing is not None:
                blocks.add(missing)
        self._waiting.extendleft(reversed(put_back))
        return wave

    def _take(self, sequences: list[Sequence], sampled: Sampled, deliveries: Deliveries) -> None:
        """Append the sampled tokens and let finished sequences go."""
        self._sampled_tokens += len(sequences)
        version = self._version
        finished: list[Sequence] = []
        for place, sequence in enumerate(sequences):
            wanted = sequence.request.top_logprobs
            top = sampled.top[place][:wanted] if sampled.top and wanted else None
            finish: FinishReason | None = sequence.append(
                sampled.ids[place], sampled.logprobs[place], version, top
            )
            if finish is not None or sequence.failure is not None:
                finished.append(sequence)
            failed = sequence.failure
            deliveries.add(sequence, sequence.take(finish) if failed is None else [failed])
        for sequence in finished:
            self._batch.remove(sequence)

    def _drop_aborted(self, deliveries: Deliveries) -> None:
        for sequence in [s for s in self._batch.sequences if s.aborted]:
            self._batch.remove(sequence)
            deliveries.add(sequence, sequence.take("abort"))
        if any(s.aborted for s in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.aborted)

    def _end_all(self) -> None:
        with self._changed:
            self._closed = True
            self._stepping = False
            error = EngineError(self._failure or "the engine was closed")
            deliveries = Deliveries()
            for sequence in (*self._batch.sequences, *self._waiting, *self._arrived):
                deliveries.add(sequence, [error])
            self._batch.sequences.clear()
            self._waiting.clear()
            self._arrived.clear()
            self._changed.notify_all()
        deliveries.send()
