"""The event loop of a run: uvloop's where it can be had."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, with a third less of CPU time for the HTTP of many agents.

    >>> async def answer() -> int:
    ...     return 42
    >>> run(answer())
    42
    """
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None: asyncio's own. uvloop is not there on Windows, which is no error."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
