"""Processes that are killed at moments of chance, and started again.

They are forked from this one, which has imported everything already: a start takes milliseconds,
so that a kill meets work more often than imports.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import psutil

from crash.scene import Scene

Main = Callable[[Scene, Callable[[], None]], Coroutine[Any, Any, None]]
_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1
_DURING_START = 0.1
"""Share of lives that end while the process is still starting."""


class Life:
    """A process that lives for a time of chance, again and again."""

    def __init__(self, name: str, main: Main, scene: Scene, mean_s: float, below: bool) -> None:
        """It lives `mean_s` seconds on average, on a machine with nothing else to do. `below`: what
        is killed is one of its children."""
        self.name, self.below = name, below
        self._main, self._scene, self._mean_s = main, scene, mean_s * scene.slowness
        self._chance = scene.chance(name)
        self.due = float("inf")
        """When it is killed (monotonic seconds)."""

    def start(self) -> None:
        """Begin to live."""
        listening, telling = _FORK.Pipe(duplex=False)
        log = self._scene.folder / "logs" / f"{self.name}.log"
        arguments = (self._main, self._scene, telling, log)
        self.process = _FORK.Process(target=_live, args=arguments, daemon=True)
        self.process.start()
        telling.close()
        self.told: Connection | None = listening
        early = self._chance.random() < _DURING_START
        self.due = (
            time.monotonic() + self._chance.random() * self._mean_s / 4 if early else float("inf")
        )

    def ready(self) -> None:
        """It has come up, or is gone before that."""
        assert self.told is not None
        up = bool(self.told.poll()) and self._heard(self.told)
        self.told.close()
        self.told = None
        if up:
            self.due = min(self.due, time.monotonic() + self.span())

    def span(self) -> float:
        """How long it may live, seconds."""
        return self._chance.expovariate(1 / self._mean_s)

    @staticmethod
    def _heard(told: Connection) -> bool:
        try:
            return bool(told.recv())
        except EOFError:
            return False


class Killing:
    """All processes of a run, while they are killed and started again."""

    def __init__(self, lives: list[Life], chance: Random) -> None:
        self._lives = lives
        self._chance = chance
        self.kills: dict[str, int] = {}
        self.exits: list[str] = []
        """Processes that ended by themselves, and how: none of them should."""
        for life in lives:
            life.start()

    @property
    def total(self) -> int:
        return sum(self.kills.values())

    def turn(self, *, killing: bool = True) -> None:
        """Wait for the next thing that happens, a second at most, and deal with it."""
        due = min(life.due for life in self._lives) if killing else float("inf")
        wait = max(0.0, min(due - time.monotonic(), 1.0))
        told = {life.told: life for life in self._lives if life.told is not None}
        ends = {life.process.sentinel: life for life in self._lives}
        for event in connection.wait([*told, *ends], wait):
            if isinstance(event, Connection):
                told[event].ready()
            elif isinstance(event, int):
                self._ended(ends[event])
        if killing:
            for life in self._lives:
                if life.due <= time.monotonic():
                    self._kill(life)

    def ask_to_stop(self, name: str, patience_s: float) -> bool:
        """Have a process end in order; returns whether it did in time."""
        (life,) = [life for life in self._lives if life.name == name]
        until = time.monotonic() + patience_s
        asked = False
        while time.monotonic() < until:
            if life.told is None and not asked:
                os.kill(life.process.pid or 0, signal.SIGTERM)
                asked = True
            if asked and life.process.exitcode == 0:
                self._lives.remove(life)
                return True
            self.turn(killing=False)
        return False

    def end(self) -> None:
        """Kill what is left."""
        for life in self._lives:
            life.process.kill()
            life.process.join()

    def _kill(self, life: Life) -> None:
        if life.below:
            children = psutil.Process(life.process.pid).children()
            if children:
                self._chance.choice(children).kill()
                self._count(f"{life.name}'s agents")
            life.due = time.monotonic() + life.span()
            return
        life.process.kill()
        life.process.join()
        self._count(life.name)
        if life.told is not None:
            life.told.close()
        life.start()

    def _ended(self, life: Life) -> None:
        """It ended by itself; what it had to say is at the end of its log."""
        life.process.join()
        code = life.process.exitcode
        if code == 0:
            return  # it was asked to
        self.exits.append(f"{life.name} ended by itself with status {code}")
        if life.told is not None:
            life.told.close()
        life.start()

    def _count(self, name: str) -> None:
        self.kills[name] = self.kills.get(name, 0) + 1


def _live(main: Main, scene: Scene, telling: Connection, log: Path) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    asyncio.run(main(scene, lambda: telling.send(True)))
