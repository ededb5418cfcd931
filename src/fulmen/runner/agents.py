"""What the user calls an agent: a Python function or a shell command.

`solver.py:solve` and `package.module:solve` are functions; everything else is a command.
"""

import importlib
import importlib.util
import inspect
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from fulmen.schema.config import nearest
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Record

_FUNCTION = re.compile(r"^(?P<source>\S+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)$")


class AgentSpec(Record, frozen=True, kw_only=True):
    """How to run an agent."""

    kind: Literal["function", "command"]
    target: str
    """`source:name` of a function, or the command line."""
    python: str = ""
    """Interpreter of an environment that has Fulmen and what the agent needs; empty: this one."""


def parse_agent(text: str) -> AgentSpec:
    """Tell a function from a command.

    >>> parse_agent("agent.py:solve").kind, parse_agent("python agent.py").kind
    ('function', 'command')
    """
    if not text.strip():
        raise AgentError("the agent is empty", hint="give file.py:function or a command")
    kind = "function" if _FUNCTION.match(text.strip()) else "command"
    return AgentSpec(kind=kind, target=text.strip())


def check_agent(spec: AgentSpec) -> None:
    """Find what can be found without running the agent.

    Raises:
        AgentError: no such file, or no such program. A function's module is imported later, in the
            worker, which reports what is wrong with it.
    """
    if spec.kind == "function":
        source = spec.target.rpartition(":")[0]
        if source.endswith(".py") and not Path(source).is_file():
            raise AgentError(f"agent {spec.target!r}: no such file {source}")
        return
    program = spec.target.split()[0]
    plain = re.fullmatch(r"[\w./+-]+", program)
    if plain and shutil.which(program) is None:
        raise AgentError(f"agent {spec.target!r}: no program {program!r} is found in PATH")


def load_function(target: str, what: str = "agent") -> Callable[..., Any]:
    """Import `file.py:name` or `module:name`.

    The file's folder and the current one can be imported from.

    Raises:
        AgentError: in one line, what could not be found or imported and why.
    """
    match = _FUNCTION.match(target)
    if match is None:
        raise AgentError(f"{what} {target!r} is not of the form file.py:function")
    source, name = match["source"], match["name"]
    module = _module(source, target, what)
    found = getattr(module, name, None)
    if found is None:
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise AgentError(
            f"{what} {target!r}: {source} has no {name!r}", hint=nearest(name, functions)
        )
    if not callable(found):
        raise AgentError(f"{what} {target!r} is a {type(found).__name__}, not a function")
    return found


def check_one_argument(function: Callable[..., Any], target: str) -> None:
    """Raises AgentError unless the function can be called with the task as its one argument."""
    try:
        inspect.signature(function).bind("task")
    except TypeError as error:
        raise AgentError(
            f"agent {target!r} cannot be called with one argument, the task ({error})"
        ) from None
    except ValueError:  # some builtins have no signature
        return


def _module(source: str, target: str, what: str) -> ModuleType:
    for folder in (str(Path.cwd()), str(Path(source).resolve().parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        path = Path(source).resolve()
        if not path.is_file():
            raise AgentError(f"{what} {target!r}: no such file {source}")
        # Under its plain name, so that what it defines can be pickled and imported again.
        if (known := sys.modules.get(path.stem)) and getattr(known, "__file__", "") == str(path):
            return known
        location = importlib.util.spec_from_file_location(path.stem, path)
        assert location is not None
        assert location.loader is not None
        module = importlib.util.module_from_spec(location)
        sys.modules[path.stem] = module
        location.loader.exec_module(module)
    except AgentError:
        raise
    except BaseException as error:
        raise AgentError(f"{what} {target!r} cannot be imported: {describe(error)}") from error
    return module


def describe(error: BaseException) -> str:
    """An exception in one line: kind, message, and the line of the user's code it came from.

    >>> describe(ValueError("no\\nwonder"))
    'ValueError: no wonder'
    """
    text = " ".join(str(error).split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    where = [f for f in frames if not f.filename.startswith((own, "<frozen"))]
    place = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
