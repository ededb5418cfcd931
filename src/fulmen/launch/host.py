"""Engines and learners in a process of their own, as this process sees it.

A thread that samples, and an event loop with the requests of many agents: in one process they take
Python's interpreter lock from each other. `hosted.py` is the other process.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.model import read_folder
from fulmen.engine.platform import environment_for
from fulmen.engine.remote import RemoteEngine, connect
from fulmen.gateway.render import ChatRenderer
from fulmen.launch.host_orders import Do, Done, End, HostPlan, Order, Raised, Ready
from fulmen.launch.policy import ServedPolicy, make_voice, model_threads
from fulmen.schema.errors import EngineError
from fulmen.schema.records import Credited, Transition
from fulmen.trainer.learners import Learners

T = TypeVar("T")

_GRACE_S = 5.0


class HostProcess:
    """The other process; orders wait for each other, and block."""

    def __init__(self, plan: HostPlan) -> None:
        """Start it; `ready` says when it can be used."""
        self._orders, theirs = Pipe()
        self.tokens, their_tokens = socket.socketpair()
        with theirs, their_tokens:
            self._process = _spawn(plan, theirs, their_tokens)
        self._turn = threading.Lock()
        self._plan = plan

    def ready(self) -> Ready:
        """Wait for it; returns what it has loaded.

        Raises:
            FulmenError, OSError, ModuleNotFoundError: as loading a model does.
            EngineError: the process ended.
        """
        with self._turn:
            self._send(self._plan)
            answer = self._receive()
        if isinstance(answer, Raised):
            raise answer.error
        assert isinstance(answer, Ready)
        return answer

    def do(self, order: Order) -> Done:
        """Have an order carried out; raises what that raises, or EngineError as `ready` does."""
        with self._turn:
            self._send(order)
            answer = self._receive()
        if isinstance(answer, Raised):
            raise answer.error
        assert isinstance(answer, Done)
        return answer

    def why_gone(self) -> str:
        """What became of a process that does not answer."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "the process of the model does not answer"
        how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        hint = "; the machine may have run out of memory" if code == -signal.SIGKILL else ""
        return f"the process of the model ended ({how}){hint}"

    def close(self) -> None:
        """End the process: at once, if it is at work for an order."""
        if self._turn.locked():
            self._process.kill()
        self._orders.close()
        self.tokens.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: HostPlan | Order) -> None:
        try:
            self._orders.send(message)
        except OSError:
            raise EngineError(self.why_gone()) from None

    def _receive(self) -> Ready | Done | Raised:
        try:
            return self._orders.recv()
        except (EOFError, OSError):
            raise EngineError(self.why_gone()) from None


def _spawn(plan: HostPlan, orders: Connection, tokens: socket.socket) -> "subprocess.Popen[bytes]":
    descriptors = [orders.fileno(), tokens.fileno()]
    return subprocess.Popen(  # noqa: S603 - Python and a module of ours
        # -P: modules in the current folder are no part of ours; the plan says where users' are.
        [sys.executable, "-P", "-m", "fulmen.launch.hosted", *map(str, descriptors)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        stdout=2,  # ours may be events for a program
        # Ctrl-C is for us, who stop it in order.
        start_new_session=True,
        env=environment_for(model_threads(plan.settings.threads), os.environ),
    )


class HostedLearners:
    """All learners of a run, in the other process; see `Learning`."""

    def __init__(self, process: HostProcess, versions: Mapping[str, int]) -> None:
        self._process = process
        self._versions = dict(versions)

    @property
    def versions(self) -> dict[str, int]:
        return self._versions

    def learn(self, credited: Sequence[Credited]) -> dict[str, float]:
        return self._do(Learners.learn, credited)

    def values(self, transitions: Sequence[Transition]) -> list[list[float]]:
        return self._do(Learners.values, transitions)

    def kl(self, transitions: Sequence[Transition]) -> list[list[float]]:
        return self._do(Learners.kl, transitions)

    def save(self, checkpoint: Path, *, final: bool = True) -> None:
        self._do(_save, checkpoint, final)

    def _do(self, method: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - the method's
        done = self._process.do(Do(method, arguments))
        self._versions = dict(done.versions)
        return done.value


def _save(learners: Learners, checkpoint: Path, final: bool) -> None:
    learners.save(checkpoint, final=final)


@dataclass(frozen=True, slots=True)
class Host:
    """The other process, ready."""

    policies: Sequence[ServedPolicy]
    frozen: Sequence[ServedPolicy]
    learners: HostedLearners
    parameters: int
    """Weights of the policies."""
    why: Sequence[str]
    """Why policies are not trained on trees."""
    end: Callable[[bytes], object]
    """Give the other processes of torchrun the run's outcome, and end them."""
    gone: Callable[[], Awaitable[str]]
    """Waits until the process has ended by itself, which it should not; says how."""

    async def while_there(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns or raises. It is cancelled if the process ends, so that failures
        which follow from that are not taken for results.

        Raises:
            EngineError: the process ended; it says how.
        """
        task, gone = asyncio.create_task(work), asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineError(gone.result())
            return task.result()
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)


@asynccontextmanager
async def hosted(plan: HostPlan) -> AsyncIterator[Host]:
    """The models of a plan, loaded and served until the context is left.

    Raises:
        FulmenError: a model cannot be loaded or trained as the settings say.
    """
    process = HostProcess(plan)
    engines: dict[str, RemoteEngine] = {}
    try:
        # What the other process says is what went wrong, even if this one cannot go on either.
        ready, speak = await asyncio.gather(
            asyncio.to_thread(process.ready),
            asyncio.to_thread(_voices, plan),
            return_exceptions=True,
        )
        if isinstance(ready, BaseException):
            raise ready
        if isinstance(speak, BaseException):
            raise speak
        grammars = {name: grammars for name, (_, grammars) in speak.items()}
        link, engines = await connect(process.tokens, ready.served, grammars, process.why_gone)
        sources = [*plan.sources, *plan.frozen]
        served = [ServedPolicy(one, engines[one.name], speak[one.name][0]) for one in sources]
        yield Host(
            policies=served[: len(plan.sources)],
            frozen=served[len(plan.sources) :],
            learners=HostedLearners(process, ready.versions),
            parameters=ready.parameters,
            why=ready.why,
            end=lambda outcome: process.do(End(outcome)),
            gone=link.gone,
        )
    finally:
        try:
            for engine in engines.values():
                await engine.close()
        finally:
            await asyncio.to_thread(process.close)


def _voices(plan: HostPlan) -> dict[str, tuple[ChatRenderer, GrammarCompiler]]:
    """How each model is spoken to, by its name."""
    found: dict[str | Path, tuple[ChatRenderer, GrammarCompiler]] = {}
    voices = {}
    for source in [*plan.sources, *plan.frozen]:
        folder = plan.folder(source)
        if folder not in found:
            read = read_folder(folder)
            found[folder] = make_voice(read.tokenizer, read.config)
        voices[source.name] = found[folder]
    return voices
