"""One attempt inside a worker process: call the function or run the command, report the outcome."""

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from fulmen.runner.agents import describe
from fulmen.runner.attribution import current_key
from fulmen.runner.capture import MOST_CHARACTERS, Log, current_log
from fulmen.runner.wire import Start
from fulmen.schema.records import JSON, Outcome

_GRACE_S = 1.0
"""Between asking a command to end and making it end."""
_PR_SET_PDEATHSIG = 1

_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that come from somebody else: a system without memory, a machine that shuts down."""

Runner = Callable[[Start], Awaitable[Outcome]]


class StillRunning(asyncio.CancelledError):
    """An attempt was stopped, but the thread that it is in cannot be."""

    def __init__(self, thread: "Future[object]") -> None:
        """`thread` is done when the thread is."""
        super().__init__()
        self.thread = thread


def environment(gateway: str, key: str) -> dict[str, str]:
    """What points clients of OpenAI's and Anthropic's interfaces at the gateway."""
    return {
        "OPENAI_BASE_URL": f"{gateway}/v1",
        "OPENAI_API_BASE": f"{gateway}/v1",  # LlamaIndex reads only this one
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": gateway,
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1,localhost"])),
    }


def telemetry(gateway: str, key: str) -> dict[str, str]:
    """What makes OpenTelemetry's exporters, in any language, send their spans to us."""
    if any(name.startswith("OTEL_EXPORTER_OTLP") for name in os.environ):
        return {}  # the user sends them somewhere already
    return {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{gateway}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization=Bearer%20{key}",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }


def function_runner(function: Callable[[JSON], Any], capacity: int) -> Runner:
    """Run attempts of a Python function: as tasks if it is async, else in threads."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )
    # Twice as many as can be asked for: threads of stopped attempts may go on for a while.
    threads = None if is_async else ThreadPoolExecutor(2 * capacity, thread_name_prefix="agent")

    async def run(start: Start) -> Outcome:
        log = Log()
        current_key.set(start.key)
        current_log.set(log)
        try:
            if threads is None:
                output = await function(start.input)
            else:
                output = await _in_thread(threads.submit(_shielded, function, start.input))
                if isinstance(output, _Raised):
                    raise output.error
            return Outcome(output=jsonable(output), log=log.text)
        except BaseException as error:  # SystemExit too: an agent may not end its worker
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            log.write("".join(traceback.format_exception(error)))
            return Outcome(failure="agent", error=describe(error), log=log.text)

    return run


async def _in_thread(work: "Future[object]") -> object:
    """The result of the work. Raises StillRunning if it is stopped, and does not end at once."""
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task and task.cancelling() and not work.cancel() and not work.done():
            raise StillRunning(work) from None
        raise


class _Raised:
    """An exception on its way out of a thread; a future would not carry SystemExit."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _shielded(function: Callable[[JSON], Any], task: JSON) -> object:
    try:
        return function(task)
    except BaseException as error:
        return _Raised(error)


def jsonable(output: object) -> JSON:
    """The output as plain JSON values; NumPy's scalars and special texts become Python's.

    Raises TypeError naming the type that cannot be kept.
    """
    if hasattr(output, "item") and getattr(output, "ndim", None) == 0:
        output = output.item()  # type: ignore[attr-defined] - checked just above
    try:
        return msgspec.json.decode(msgspec.json.encode(output, enc_hook=_plain))
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        name = type(output).__name__
        raise TypeError(
            f"the agent returned a {name}, which is not JSON ({error}); return text or a number"
        ) from None


def _plain(value: object) -> str:
    """The text of a subclass of str, such as LangChain's messages give."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"{type(value).__name__} cannot be written")


def command_runner(command: str, gateway: str) -> Runner:
    """Run attempts as processes: task on standard input, answer on standard output."""

    async def run(start: Start) -> Outcome:
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                **environment(gateway, start.key),
                **telemetry(gateway, start.key),
                "FULMEN_ROLLOUT_ID": start.rollout_id,
            },
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            answer, errors = await process.communicate(msgspec.json.encode(start.input))
        finally:
            # Whatever it left running goes too, whether it ended or is being stopped.
            await _end_group(process)
        output = answer.decode(errors="replace").strip()
        log = errors.decode(errors="replace")[-MOST_CHARACTERS:]
        if process.returncode == 0:
            return Outcome(output=output, log=log)
        code = process.returncode or 0
        # A shell tells by a status above 128 which signal has ended what it ran.
        by_others = -code in _OTHERS or code - 128 in _OTHERS
        how = f"exit status {code}" if code > 0 else f"signal {-code}"
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "")
        return Outcome(
            failure="infrastructure" if by_others else "agent",
            error=f"the command ended with {how}: {last.strip()[:300]}",
            output=output,
            log=log,
        )

    return run


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """End a command and all of its process group."""
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if process.returncode is not None and number is signal.SIGTERM:
            continue  # the command itself is gone; stragglers are not waited for
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience)
    await process.wait()


def _die_with_parent() -> None:
    """In the child, before it becomes the command: end when the worker ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
