"""What the user calls an agent: a Python function, the URL of a server, or a shell command.

`solver.py:solve` and `package.module:solve` are functions, `http://host:port/path` is a URL;
everything else is a command.
"""

import importlib
import importlib.util
import inspect
import re
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit

from fulmen.runner.capture import sendable
from fulmen.schema.config import nearest
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Record

_URL = re.compile(r"^https?://", re.IGNORECASE)
_CONNECT_S = 10.0
_FUNCTION = re.compile(r"^(?P<source>\S+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)$")


class AgentSpec(Record, frozen=True, kw_only=True):
    """How to run an agent."""

    kind: Literal["function", "command", "http"]
    target: str
    """`source:name` of a function, the command line, or the URL."""
    python: str = ""
    """Interpreter for a function whose packages are in another environment; Fulmen is installed
    there too, without its extras if need be. Empty: the one that runs Fulmen."""


def parse_agent(text: str, python: str = "") -> AgentSpec:
    """Tell functions, URLs and commands from each other; `python` as in `AgentSpec`.

    >>> [parse_agent(a).kind for a in ("agent.py:solve", "python agent.py", "http://localhost:80")]
    ['function', 'command', 'http']
    """
    if not text.strip():
        raise AgentError("the agent is empty", hint="give file.py:function, a command or a URL")
    target = text.strip()
    if _URL.match(target):
        return AgentSpec(kind="http", target=target)
    kind = "function" if _FUNCTION.match(target) else "command"
    return AgentSpec(kind=kind, target=target, python=python)


def check_agent(spec: AgentSpec) -> None:
    """Find what can be found without running the agent.

    Raises:
        AgentError: no such file, no such program, or nobody listens at the URL. A function's module
            is imported later, in the worker, which reports what is wrong with it.
    """
    if spec.kind == "http":
        _check_url(spec.target)
        return
    if spec.kind == "function":
        source = spec.target.rpartition(":")[0]
        if source.endswith(".py") and not Path(source).is_file():
            raise AgentError(f"agent {spec.target!r}: no such file {source}")
        return
    program = spec.target.split()[0]
    plain = re.fullmatch(r"[\w./+-]+", program)
    if plain and shutil.which(program) is None:
        raise AgentError(f"agent {spec.target!r}: no program {program!r} is found in PATH")


def _check_url(url: str) -> None:
    """Whether a URL is one, and somebody listens there."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AgentError(f"agent {url!r} is no URL ({error})") from None
    if not host or parts.fragment or parts.username is not None or any(c.isspace() for c in url):
        raise AgentError(f"agent {url!r} is no URL of the form http://host:port/path")
    try:
        port = port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise AgentError(
            f"agent {url!r} cannot be reached ({reason})", hint="start it before the run"
        ) from None


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
    text = " ".join(sendable(str(error)).split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    where = [f for f in frames if not f.filename.startswith((own, "<frozen"))]
    place = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
