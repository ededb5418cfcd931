"""Small questions that come within the same few milliseconds go out as one batch.

A thousand agents on one machine then make some hundred requests a second, whatever they do. When
the server is slow, more questions gather, and the batches grow.

What concerns the same rollout stays in order: a question waits here while an earlier one about its
rollout is under way.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from fulmen.runner.store_link import error_of
from fulmen.schema.errors import DataError, FulmenError, StoreError
from fulmen.store.verbs import Ask, Refusal, verb_of

_GATHER_S = 0.004
_UNDER_WAY = 4
_MOST_QUESTIONS = 4000
_MOST_BYTES = 8 * 2**20
"""Of a batch, unless one question alone has more."""
_MOST_WAITING = 20_000
"""Promises that may wait; whoever brings more waits as well, so that memory stays bounded."""

_encode = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(list[tuple[bool, msgspec.Raw]])
_refusals = msgspec.msgpack.Decoder(Refusal)


@dataclass(slots=True, eq=False)
class _Asked:
    lanes: tuple[str, ...]
    """Rollouts concerned."""
    body: bytes
    """The question; of a promise one of its items."""
    answer: "asyncio.Future[msgspec.Raw] | None" = None
    """None: a promise."""
    joins: tuple[type[Ask], str] | None = None
    """Of a promise: the verb, and the field that all items go into together."""


@dataclass(slots=True)
class _Batch:
    asked: list[_Asked] = field(default_factory=list)
    questions: list[object] = field(default_factory=list)
    owners: list[_Asked | None] = field(default_factory=list)
    """Who waits for the answer to each question."""
    joined: dict[tuple[type[Ask], str], list[msgspec.Raw]] = field(default_factory=dict)

    def add(self, asked: _Asked) -> None:
        self.asked.append(asked)
        raw = msgspec.Raw(asked.body)
        if asked.joins is None:
            self.questions.append(raw)
            self.owners.append(asked if asked.answer is not None else None)
        elif asked.joins in self.joined:
            self.joined[asked.joins].append(raw)
        else:
            items = self.joined[asked.joins] = [raw]
            kind, name = asked.joins
            self.questions.append({"verb": verb_of(kind), name: items})
            self.owners.append(None)


class Gathering:
    """Questions of one event loop on their way to a server."""

    def __init__(self, post: Callable[[bytes], Awaitable[bytes]]) -> None:
        """`post` sends a batch, and returns what the server answers."""
        self._post = post
        self._waiting: list[_Asked] = []
        self._busy: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._room = asyncio.Event()
        self.lost: FulmenError | None = None
        """Why a promise was broken."""

    async def ask(self, body: bytes, lanes: Sequence[str] = ()) -> msgspec.Raw:
        """The answer to a question.

        Raises:
            FulmenError: the server's refusal, why there is no answer, or why a promise was broken.
        """
        self._check()
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._add(_Asked(tuple(lanes), body, answer))
        return await answer

    async def promise(
        self, items: Iterable[tuple[str, bytes]], joins: tuple[type[Ask], str] | None
    ) -> None:
        """Send items, each with its rollout, some time soon; waits only if too many wait already.

        If they cannot be sent, everything later fails.
        """
        self._check()
        while len(self._waiting) >= _MOST_WAITING:
            self._room.clear()
            await self._room.wait()
            self._check()
        for rollout_id, body in items:
            self._add(_Asked((rollout_id,), body, joins=joins))

    async def drain(self) -> None:
        """Wait until nothing waits, and nothing is under way."""
        while self._waiting or self._tasks:
            self._send()  # which leaves out what nobody waits for any more
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """End what is under way."""
        self._stop(StoreError("the store is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check(self) -> None:
        if self.lost is not None:
            raise type(self.lost)(self.lost.message, hint=self.lost.hint)

    def _add(self, asked: _Asked) -> None:
        self._waiting.append(asked)
        if self._timer is None and len(self._tasks) < _UNDER_WAY:
            loop = asyncio.get_running_loop()
            # The first goes at once, with what this turn of the loop brings.
            self._timer = (
                loop.call_later(_GATHER_S, self._send)
                if self._tasks
                else loop.call_soon(self._send)
            )

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and len(self._tasks) < _UNDER_WAY:
            batch = self._next_batch()
            if not batch.asked:
                return
            for asked in batch.asked:
                self._busy.update(asked.lanes)
            task = asyncio.ensure_future(self._run(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> _Batch:
        """What may go now, in order."""
        batch, later, size = _Batch(), [], 0
        held: set[str] = set()  # lanes of what stays behind
        for place, asked in enumerate(self._waiting):
            size += len(asked.body)
            full = batch.asked and (size > _MOST_BYTES or len(batch.asked) >= _MOST_QUESTIONS)
            if full:
                later += self._waiting[place:]
                break
            if any(lane in self._busy or lane in held for lane in asked.lanes):
                held.update(asked.lanes)
                later.append(asked)
            elif asked.answer is None or not asked.answer.cancelled():
                batch.add(asked)
        self._waiting = later
        if len(later) < _MOST_WAITING:
            self._room.set()
        return batch

    async def _run(self, batch: _Batch) -> None:
        try:
            self._settle(batch, await self._answers(batch))
        except FulmenError as error:
            self._fail(batch, error)
        except Exception as error:
            # Whatever it is: who waits for an answer would wait for ever.
            self._fail(batch, StoreError(f"a request could not be sent ({error!r})"))
        finally:
            self._busy.subtract(lane for asked in batch.asked for lane in asked.lanes)
            self._busy = +self._busy  # without zeros
            asyncio.get_running_loop().call_soon(self._send)

    async def _answers(self, batch: _Batch) -> list[tuple[bool, msgspec.Raw]]:
        content = await self._post(_encode(batch.questions))
        try:
            answers = _answers.decode(content)
        except msgspec.DecodeError as error:
            raise DataError(f"not the answers to a batch: {error}") from error
        if len(answers) != len(batch.questions):
            raise DataError(f"{len(answers)} answers to {len(batch.questions)} questions")
        return answers

    def _settle(self, batch: _Batch, answers: Sequence[tuple[bool, msgspec.Raw]]) -> None:
        for asked, (done, raw) in zip(batch.owners, answers, strict=True):
            if asked is not None and asked.answer is not None:
                if not asked.answer.done():
                    if done:
                        asked.answer.set_result(raw)
                    else:
                        asked.answer.set_exception(error_of(_refusals.decode(raw)))
            elif not done:
                self._stop(error_of(_refusals.decode(raw)))

    def _fail(self, batch: _Batch, error: FulmenError) -> None:
        for asked in batch.asked:
            if asked.answer is None:
                self._stop(error)
            elif not asked.answer.done():
                asked.answer.set_exception(type(error)(error.message, hint=error.hint))

    def _stop(self, error: FulmenError) -> None:
        """A promise is broken: nothing that comes after may look kept."""
        self.lost = self.lost or error
        waiting, self._waiting = self._waiting, []
        self._room.set()
        for asked in waiting:
            if asked.answer is not None and not asked.answer.done():
                asked.answer.set_exception(type(error)(error.message, hint=error.hint))
