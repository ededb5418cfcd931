"""The thread that samples: one token for every sequence a step, whatever policies these are of.

A step admits waiting requests and computes their prompts, a wave of them together, in the pass that
decodes one token for every sequence at work. Requests join and leave at any step. Several policies
are adapters of the one model, each with a version of its own; between two steps the weights of one
may change, and only its sequences are computed anew.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fulmen.engine.base import FinishReason
from fulmen.engine.pytorch.batch import Batch, Sampled
from fulmen.engine.pytorch.prefix import BlockKey
from fulmen.engine.pytorch.sequence import Deliveries, Sequence
from fulmen.schema.errors import EngineError

_PREFILL_TOKENS = 4096
"""Positions in one forward pass of prefill: larger ones lose the processor's cache."""
_PREFIX_BYTES = 256 * 2**20
_CLOSED = "the engine was closed"


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


class Stepper:
    """A model's batch and its thread; safe to use from several event loops and threads."""

    def __init__(self, model: PreTrainedModel, *, max_batch: int) -> None:
        """Nobody is served yet; see `join`."""
        self._batch = Batch(model, max_batch=max_batch, prefix_bytes=_PREFIX_BYTES)
        self._versions: dict[str | None, int] = {}
        """Of each policy, by its adapter."""
        self._serving: set[str | None] = set()
        """Adapters of the policies that have not left."""
        self._waiting: deque[Sequence] = deque()
        self._sampled_tokens = 0
        self._changed = threading.Condition()
        self._arrived: deque[Sequence] = deque()
        self._holding = 0
        """How many wait for the thread to keep still, or have it do so."""
        self._stepping = False
        self._closed = False
        self._failure: str = ""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

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

    def version(self, adapter: str | None) -> int:
        """Of the weights that the policy's next token will be sampled from."""
        return self._versions[adapter]

    def join(self, adapter: str | None, version: int) -> None:
        """Serve one more policy: that of an adapter, or None: the model as it is.

        Raises:
            ValueError: it is served already.
        """
        with self._changed:
            if adapter in self._versions:
                raise ValueError(f"adapter {adapter!r} has an engine already")
            self._versions[adapter] = version
            self._serving.add(adapter)

    def submit(self, sequence: Sequence) -> None:
        """Sample a sequence; what comes of it goes over its line.

        Raises:
            EngineError: the thread has ended, or the sequence's policy has left.
        """
        with self._changed:
            if self._closed or sequence.adapter not in self._serving:
                raise EngineError(self._failure or "the engine is closed")
            self._arrived.append(sequence)
            self._changed.notify_all()

    @contextmanager
    def updating(self, adapter: str | None, version: int) -> Iterator[None]:
        """Keep still between two steps while the weights of a policy change; see
        `LocalEngine.updating`."""
        with self._held():
            try:
                yield
                with self._changed:
                    self._versions[adapter] = version
                    self._waiting.extendleft(reversed(self._batch.forget(adapter)))
            except BaseException:
                with self._changed:
                    self._failure = "an update of the weights failed half-way"
                    self._closed = True
                raise

    def leave(self, adapter: str | None) -> None:
        """Serve a policy no longer, and end what it has under way with an EngineError; after the
        last one, end the thread."""
        with self._held(), self._changed:
            self._serving.discard(adapter)
            self._closed = self._closed or not self._serving
            if not self._closed:
                self._drop(adapter)
        if self._closed:
            self._thread.join()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._changed:
            self._holding += 1
            self._changed.wait_for(lambda: not self._stepping)
        try:
            yield
        finally:
            with self._changed:
                self._holding -= 1
                self._changed.notify_all()

    def _drop(self, adapter: str | None) -> None:
        """End all sequences of an adapter."""
        gone = self._batch.forget(adapter)
        for queue in (self._waiting, self._arrived):
            own = [sequence for sequence in queue if sequence.adapter == adapter]
            for sequence in own:
                queue.remove(sequence)
            gone += own
        deliveries = Deliveries()
        for sequence in gone:
            deliveries.add(sequence, [EngineError(_CLOSED)])
        deliveries.send()

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
                        not self._holding
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
        wave = self._admit()
        if wave or self._batch.sequences:
            sampled = self._batch.step(wave, _PREFILL_TOKENS)
            self._take(list(self._batch.sequences), sampled, deliveries)
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
        finished: list[Sequence] = []
        for place, sequence in enumerate(sequences):
            wanted = sequence.request.top_logprobs
            top = sampled.top[place][:wanted] if sampled.top and wanted else None
            finish: FinishReason | None = sequence.append(
                sampled.ids[place], sampled.logprobs[place], self._versions[sequence.adapter], top
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
            error = EngineError(self._failure or _CLOSED)
            deliveries = Deliveries()
            for sequence in (*self._batch.sequences, *self._waiting, *self._arrived):
                deliveries.add(sequence, [error])
            self._batch.sequences.clear()
            self._waiting.clear()
            self._arrived.clear()
            self._changed.notify_all()
        deliveries.send()
