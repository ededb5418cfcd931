"""The near end of engines in another process: requests go over a socket, tokens come back.

An event loop that serves many agents and a thread that samples for them would take Python's
interpreter lock from each other in one process. In two, both go on.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from fulmen.engine.base import Delta, EngineInfo, GenerateRequest, check_request
from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.wire import (
    Abort,
    Failed,
    Generate,
    Published,
    Sampled,
    Served,
    Told,
    asking,
    error_of,
    told,
)
from fulmen.schema.errors import EngineError, FulmenError, GrammarError
from fulmen.schema.frames import next_frame

_MOST_SEED = 2**64
_CLOSED = "the engine was closed"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """For a completion."""

    engine: str
    queue: "asyncio.Queue[Delta | FulmenError]" = field(default_factory=asyncio.Queue)


class EngineLink:
    """The socket and what is under way over it; used from one event loop."""

    def __init__(
        self,
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        versions: Mapping[str, int],
        why_gone: Callable[[], str],
    ) -> None:
        """`versions` are those of all engines, by name; `why_gone` says what happened, once the far
        end has closed its side."""
        self.versions = dict(versions)
        """As the far end said last."""
        self._reader, self._writer = connection
        self._why_gone = why_gone
        self._serving = set(versions)
        self._failure = ""
        self._next = 0
        self._waiting: dict[int, _Waiting] = {}
        self._listening = asyncio.create_task(self._listen())

    async def gone(self) -> str:
        """Wait until the far end is gone; returns what happened."""
        await asyncio.wait([self._listening])
        return self._failure

    def start(
        self, engine: str, request: GenerateRequest
    ) -> tuple[int, "asyncio.Queue[Delta | FulmenError]"]:
        """Ask for a completion; returns its ticket, and where its tokens will be.

        Raises:
            EngineError: the far end is gone, or the engine is closed.
        """
        if self._failure or engine not in self._serving:
            raise EngineError(self._failure or _CLOSED)
        ticket, waiting = self._next, _Waiting(engine)
        self._writer.write(asking(Generate(ticket=ticket, engine=engine, request=request)))
        self._next += 1
        self._waiting[ticket] = waiting
        return ticket, waiting.queue

    def leave(self, ticket: int) -> None:
        """Nobody waits for a ticket any more."""
        if self._waiting.pop(ticket, None) is not None:
            self._writer.write(asking(Abort(ticket=ticket)))

    async def close(self, engine: str) -> None:
        """End what runs of an engine with an EngineError; after the last engine, hang up."""
        self._serving.discard(engine)
        for ticket in [t for t, waiting in self._waiting.items() if waiting.engine == engine]:
            self._waiting[ticket].queue.put_nowait(EngineError(_CLOSED))
            self.leave(ticket)
        if not self._serving:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            # Not `close`, which would wait for a far end that reads nothing more.
            self._writer.transport.abort()
            with suppress(ConnectionError):
                await self._writer.wait_closed()

    async def _listen(self) -> None:
        try:
            while (data := await next_frame(self._reader)) is not None:
                for message in told(data):
                    self._take(message)
        except Exception as error:
            self._fail(f"what the engine says cannot be read ({type(error).__name__}: {error})")
        else:
            self._fail(await asyncio.to_thread(self._why_gone))

    def _take(self, message: Told) -> None:
        match message:
            case Published():
                self.versions[message.engine] = message.version
            case Sampled():
                last = message.delta.finish_reason is not None
                self._put(message.ticket, message.delta, last=last)
            case Failed():
                self._put(message.ticket, error_of(message), last=True)

    def _put(self, ticket: int, event: Delta | FulmenError, *, last: bool) -> None:
        waiting = self._waiting.pop(ticket, None) if last else self._waiting.get(ticket)
        if waiting is not None:
            waiting.queue.put_nowait(event)

    def _fail(self, why: str) -> None:
        self._failure = why
        for waiting in self._waiting.values():
            waiting.queue.put_nowait(EngineError(why))
        self._waiting.clear()


class RemoteEngine:
    """One engine of the far end."""

    def __init__(
        self,
        link: EngineLink,
        name: str,
        info: EngineInfo,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`name` is that of its policy at the far end; `grammars` are those that it knows there."""
        self._link = link
        self._name = name
        self._info = info
        self._grammars = grammars

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def version(self) -> int:
        return self._link.versions[self._name]

    def check_grammar(self, grammar: str) -> None:
        """Compile it here; see `Engine.check_grammar`."""
        if self._grammars is None:
            raise GrammarError("this engine samples freely only; answers cannot be given a form")
        self._grammars.start(grammar)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Sample one completion; see `Engine.generate`."""
        check_request(request, self._info)
        if request.grammar:
            self.check_grammar(request.grammar)
        if request.seed is not None:
            request = replace(request, seed=request.seed % _MOST_SEED)
        ticket, queue = self._link.start(self._name, request)
        try:
            while True:
                event = await queue.get()
                if isinstance(event, FulmenError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._link.leave(ticket)

    async def close(self) -> None:
        """See `EngineLink.close`."""
        await self._link.close(self._name)


async def connect(
    connection: socket.socket,
    served: Mapping[str, Served],
    grammars: Mapping[str, GrammarCompiler],
    why_gone: Callable[[], str],
) -> tuple[EngineLink, dict[str, RemoteEngine]]:
    """The engines behind a socket, by name; closing them all closes it.

    `why_gone` says what happened, should the far end close its side.
    """
    versions = {name: engine.version for name, engine in served.items()}
    link = EngineLink(await asyncio.open_connection(sock=connection), versions, why_gone)
    return link, {
        name: RemoteEngine(link, name, engine.info, grammars.get(name))
        for name, engine in served.items()
    }
