"""`file.py:function`: a Python function that returns tasks, or yields them."""

import inspect
from collections.abc import Iterator

from fulmen.runner.agents import describe, load_function
from fulmen.schema.errors import AgentError, DataError
from fulmen.trainer.sources.rows import Row, iterable_rows


def function_rows(target: str) -> Iterator[Row]:
    """Rows of what the function gives when it is called with nothing.

    Raises:
        DataError: it cannot be imported, wants arguments, raises, or gives what are no tasks.
    """
    try:
        function = load_function(target, "tasks")
    except AgentError as error:
        split = "" if ".py:" in target else "if it is folder:split, check the folder's path"
        raise DataError(error.message, hint=error.hint or split) from None
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise DataError(f"{target}: is async", hint="write it with def")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise DataError(
            f"{target}: cannot be called without arguments ({error})", hint="give them defaults"
        ) from None
    try:
        yield from iterable_rows(function(), target)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{target} raised {describe(error)}") from error
