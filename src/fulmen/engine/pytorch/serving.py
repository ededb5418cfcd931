"""The far end of a remote engine: what comes over a socket is sampled, and told as it is sampled.

A thread reads requests. The engines' own threads write what they sampled, one frame a step.
"""

import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress

from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.engine.pytorch.sequence import Event, Sequence
from fulmen.engine.wire import (
    Abort,
    Asked,
    Generate,
    Published,
    Sampled,
    Served,
    Told,
    asked,
    failed,
    telling,
)
from fulmen.schema.errors import EngineError, FulmenError
from fulmen.schema.frames import read_frame


class Serving:
    """A socket and the engines behind it; see `remote.py` for the other end."""

    def __init__(self, connection: socket.socket, engines: Mapping[str, LocalEngine]) -> None:
        """Nothing is read yet; see `run`."""
        self._connection = connection
        self._engines = engines
        self._turn = threading.Lock()
        self._sequences: weakref.WeakValueDictionary[int, Sequence] = weakref.WeakValueDictionary()
        """Of each ticket, as long as its engine has it."""

    @property
    def served(self) -> dict[str, Served]:
        """What the near end has to know before it asks."""
        return {
            name: Served(info=engine.info, version=engine.version)
            for name, engine in self._engines.items()
        }

    def run(self) -> None:
        """Do what is asked, until the near end is gone."""
        with self._connection.makefile("rb") as file:
            while (data := read_frame(file)) is not None:
                self._obey(asked(data))

    def updating(self, name: str) -> Callable[[int], AbstractContextManager[None]]:
        """`LocalEngine.updating` of an engine, told to the near end."""
        engine = self._engines[name]

        @contextmanager
        def updating(version: int) -> Iterator[None]:
            with engine.updating(version):
                yield
                # While the engine keeps still: before anything that it samples after this.
                self._tell([Published(engine=name, version=version)])

        return updating

    def send(self, due: list[tuple[int, Event]]) -> None:
        """What engines sampled, by ticket; see `Line`."""
        self._tell(
            [
                failed(ticket, event)
                if isinstance(event, FulmenError)
                else Sampled(ticket=ticket, delta=event)
                for ticket, event in due
            ]
        )

    def _obey(self, message: Asked) -> None:
        match message:
            case Generate():
                try:
                    engine = self._engines[message.engine]
                    sequence = engine.start(message.request, self, message.ticket)
                    self._sequences[message.ticket] = sequence
                except FulmenError as error:
                    self._tell([failed(message.ticket, error)])
                except Exception as error:
                    # A bug in one request is its own affair, not that of all others.
                    reason = f"{type(error).__name__}: {error}"
                    self._tell([failed(message.ticket, EngineError(reason))])
            case Abort():
                if (running := self._sequences.get(message.ticket)) is not None:
                    running.aborted = True

    def _tell(self, messages: list[Told]) -> None:
        data = telling(messages)
        with self._turn, suppress(OSError):  # the near end is gone: nobody is to be told
            self._connection.sendall(data)
