"""Tasks from a JSONL file, and the order in which training asks for them."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fulmen.schema.errors import DataError
from fulmen.schema.records import JSON, Task

_RESERVED = ("id", "metadata")


def read_tasks(path: Path | str) -> list[Task]:
    """Read one task a line: any JSON; of an object, `id` and `metadata` are kept apart.

    Everything else of the object is the agent's input. A line without an id is named by a hash of
    its content, so that the same task has the same name in every run.

    Raises:
        DataError: no such file, no task in it, or the first bad line with its number and reason.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", hint="check the path of the tasks") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    tasks = [
        _task(line, f"{path}:{number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not tasks:
        raise DataError(f"{path}: holds no task", hint="write one JSON object a line")
    _check_ids(tasks, path)
    return tasks


def _task(line: str, where: str) -> Task:
    try:
        value: JSON = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise DataError(
            f"{where}: not valid JSON ({reason})", hint="fix or delete the line"
        ) from None
    fallback = hashlib.sha256(line.strip().encode()).hexdigest()[:12]
    if not isinstance(value, dict):
        return Task(id=fallback, input=value)
    metadata = value.get("metadata", {})
    if not isinstance(metadata, dict):
        kind = type(metadata).__name__
        raise DataError(f"{where}: metadata is a {kind}, not an object", hint="write {{…}}")
    name = value.get("id", fallback)
    if not isinstance(name, str | int):
        raise DataError(f"{where}: id is {name!r}", hint="use a string or an integer")
    rest = {key: item for key, item in value.items() if key not in _RESERVED}
    return Task(id=str(name), input=rest, metadata=metadata)


def _check_ids(tasks: Sequence[Task], path: Path) -> None:
    seen: dict[str, int] = {}
    for number, task in enumerate(tasks, start=1):
        if task.id in seen:
            raise DataError(
                f"{path}: tasks {seen[task.id]} and {number} have the same id {task.id!r}",
                hint="make ids unique, or leave them out",
            )
        seen[task.id] = number


def kind_of(task: Task, key: str) -> str:
    """The kind of a task, as its metadata names it.

    Raises:
        DataError: the metadata has no such key, or what it holds is no name.

    >>> kind_of(Task(id="t1", input="1+1?", metadata={"env": "calc"}), "env")
    'calc'
    """
    kind = task.metadata.get(key)
    if not isinstance(kind, str | int):
        found = "is not there" if kind is None else f"is {str(kind)[:80]!r}, no name"
        raise DataError(
            f"task {task.id!r}: {key!r} of its metadata {found} (task_kind)",
            hint=f'write "metadata": {{"{key}": "…"}} in its line',
        )
    return str(kind)


def task_order(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """Yield tasks for ever: every task once per pass, each pass shuffled anew from `seed`.

    >>> tasks = [Task(id=name, input=None) for name in "abc"]
    >>> order = task_order(tasks, seed=0)
    >>> sorted(next(order).id for _ in range(3)) == sorted(next(order).id for _ in range(3))
    True
    """
    pass_number = 0
    while True:
        shuffled = list(tasks)
        random.Random(f"{seed}/{pass_number}").shuffle(shuffled)  # noqa: S311 - not cryptography
        yield from shuffled
        pass_number += 1
