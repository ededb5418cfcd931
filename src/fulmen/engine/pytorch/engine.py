"""An engine in the process that makes it: continuous batching over weights that the learner shares.

The work is done by a thread (`stepper.py`), which several policies may share: each has an engine of
its own, and where they are adapters of one model, their sequences are one batch.

What is repeatable: a request's random numbers depend on its seed alone, so with the same weights it
samples the same tokens alone or in company, up to the rounding of sums. Measured in float32 on an
AMD CPU with `dense`: 48 of 48 completions had the same tokens alone and among 48, 45 of them also
bitwise the same log-probabilities, the rest within 1e-6 (prefill of another width sums in another
order). Bit for bit the same is promised only for the same batches, as one agent at a time makes
them.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import replace

from transformers import PreTrainedModel

from fulmen.engine.base import Delta, EngineInfo, GenerateRequest, check_request
from fulmen.engine.grammar import GrammarCompiler, Matcher
from fulmen.engine.pytorch.attention import prepare
from fulmen.engine.pytorch.sequence import Event, Line, Sequence, ToLoop
from fulmen.engine.pytorch.stepper import Stats, Stepper
from fulmen.schema.errors import FulmenError, GrammarError


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
        grammars: GrammarCompiler | None = None,
        adapter: str | None = None,
    ) -> None:
        """Raises ModelError if the model's family cannot be served.

        Without `grammars` it samples freely only. Of a model with several adapters it serves
        `adapter`, or the model without any; `beside` serves the others.
        """
        prepare(model)
        self._info = EngineInfo(name, max_context, model.config.get_text_config().vocab_size)
        self._grammars = grammars
        self._adapter = adapter
        self._stepper = Stepper(model, max_batch=max_batch)
        self._stepper.join(adapter, version)

    def beside(self, *, name: str, adapter: str | None, version: int = 0) -> "LocalEngine":
        """An engine for another adapter of the same model: its requests join the same batches, its
        versions are its own. The thread ends when all engines are closed.

        Raises:
            ValueError: the adapter has an engine already.
        """
        self._stepper.join(adapter, version)
        engine = copy.copy(self)
        engine._info = replace(self._info, model=name)
        engine._adapter = adapter
        return engine

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def version(self) -> int:
        return self._stepper.version(self._adapter)

    @property
    def stats(self) -> Stats:
        """Counters since the start, of all engines that share the thread."""
        return self._stepper.stats

    def check_grammar(self, grammar: str) -> None:
        """Compile it, for `generate` to use; see `Engine.check_grammar`."""
        self._matcher(grammar)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Sample one completion; see `Engine.generate`."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        sequence = self.start(request, ToLoop(asyncio.get_running_loop()), queue)
        try:
            while True:
                event = await queue.get()
                if isinstance(event, FulmenError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            sequence.aborted = True

    def start(self, request: GenerateRequest, line: Line, address: object) -> Sequence:
        """Begin to sample one completion, whose events a line is to bring to an address. Set
        `aborted` of what is returned to end it at the next token.

        Raises as `Engine.generate`.
        """
        check_request(request, self._info)
        matcher = self._matcher(request.grammar) if request.grammar else None
        sequence = Sequence(request, line, address, matcher, self._adapter)
        self._stepper.submit(sequence)
        return sequence

    def updating(self, version: int) -> AbstractContextManager[None]:
        """Hold the engine between two steps while the weights change; then publish `version`.

        Requests under way go on after it: their keys and values are computed anew under the new
        weights, and their tokens say which version sampled them. Those of other adapters wait, and
        go on with what they have. If the context is left by an exception, the weights may be of no
        version at all: the engine then ends with an error.
        """
        return self._stepper.updating(self._adapter, version)

    async def close(self) -> None:
        """End what runs with an EngineError, and with the last engine the thread."""
        await asyncio.to_thread(self._stepper.leave, self._adapter)

    def _matcher(self, grammar: str) -> Matcher:
        if self._grammars is None:
            raise GrammarError("this engine samples freely only; answers cannot be given a form")
        return self._grammars.start(grammar)
