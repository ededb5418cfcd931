"""A thread that listens to PostgreSQL's notifications, on a connection of its own.

It sleeps until the server sends something. When the connection is lost it makes another, and says
for how long it may have missed something.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg import sql

_SHORTEST_S, _LONGEST_S = 0.05, 2.0
"""Pauses between tries to reconnect."""

_log = logging.getLogger(__name__)


class Ears:
    """Hears what is sent to one channel until it is closed."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection],
        channel: str,
        *,
        where: str,
        heard: Callable[[str], None],
        again: Callable[[float], None],
    ) -> None:
        """Listen from now on.

        Args:
            connect: makes a connection in autocommit mode.
            channel: what is listened to.
            where: names the server in messages.
            heard: called with the text of each notification.
            again: called after a connection was lost and made anew, with the seconds for which
                notifications may be missing.

        Raises:
            psycopg.Error: the server cannot be reached.
        """
        self._connect, self._channel, self._where = connect, channel, where
        self._heard, self._again = heard, again
        self._closed = threading.Event()
        connection = self._open()
        self._waking, self._woken = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(connection,), name="fulmen-store-ears", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        self._waking.send(b"x")
        self._thread.join()
        self._waking.close()
        self._woken.close()

    def _open(self) -> psycopg.Connection:
        connection = self._connect()
        try:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        except BaseException:
            connection.close()
            raise
        return connection

    def _run(self, connection: psycopg.Connection | None) -> None:
        while connection is not None:
            with contextlib.closing(connection):
                try:
                    self._listen(connection)
                except psycopg.Error as error:
                    _log.warning("%s: the connection was lost (%s)", self._where, first_line(error))
            if self._closed.is_set():
                return
            lost = time.monotonic()
            connection = self._reopen()
            if connection is not None:
                _log.warning("%s: connected again", self._where)
                self._guarded(lambda lost=lost: self._again(time.monotonic() - lost))

    def _listen(self, connection: psycopg.Connection) -> None:
        """Until closed. Raises psycopg.Error when the connection is lost."""
        server = connection.pgconn
        with selectors.DefaultSelector() as ready:
            ready.register(server.socket, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while not self._closed.is_set():
                # What came together with an earlier answer is here already.
                while notice := server.notifies():
                    text = notice.extra.decode()
                    self._guarded(lambda text=text: self._heard(text))
                ready.select()
                server.consume_input()

    def _reopen(self) -> psycopg.Connection | None:
        """A new connection, however long it takes; None when closed."""
        pause = _SHORTEST_S
        while not self._closed.is_set():
            try:
                return self._open()
            except psycopg.Error:
                self._closed.wait(pause)
                pause = min(2 * pause, _LONGEST_S)
        return None

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # A listener's bug must not make this process deaf.
            _log.exception("a listener of the store raised")


def first_line(error: BaseException | None) -> str:
    """A database's message, without the lines after the first."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
