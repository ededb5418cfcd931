"""Tasks from rows of any source, and the order in which training asks for them."""

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from fulmen.schema.errors import DataError
from fulmen.schema.records import JSON, Task
from fulmen.trainer.sources.open import read_rows
from fulmen.trainer.sources.rows import Row

_RESERVED = ("id", "metadata")
_PREFIX = "metadata."


def read_tasks(source: Path | str) -> list[Task]:
    """Read tasks from a file, a folder or a function, whatever `sources/open.py` knows.

    A row is any JSON value. Of an object, `id` and `metadata` are kept apart, and a key
    `metadata.answer` is `answer` of the metadata; everything else is the agent's input. A row
    without an id is named by a hash of what it says, so that the same task has the same name in
    every run and in every format.

    Raises:
        DataError: no such source, no task in it, or the first bad row: where, why, what to do.
    """
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for row in read_rows(source):
        task = make_task(row)
        if (other := places.setdefault(task.id, row.where)) != row.where:
            raise DataError(
                f"{other} and {row.where} have the same id {task.id!r}",
                hint="make ids unique; rows without an id are to differ",
            )
        tasks.append(task)
    if not tasks:
        raise DataError(f"{source}: holds no task", hint="write at least one")
    return tasks


def make_task(row: Row) -> Task:
    """A row as a task.

    Raises:
        DataError: its id or its metadata is none.

    >>> make_task(Row("t.csv:2", {"id": "7", "question": "1+1?", "metadata.answer": "2"}))
    Task(id='7', input={'question': '1+1?'}, metadata={'answer': '2'})
    """
    where, value = row
    if not isinstance(value, dict):
        return Task(id=_hash(value, {}), input=value)
    metadata = _metadata(value, where)
    rest = {
        key: item
        for key, item in value.items()
        if key not in _RESERVED and not key.startswith(_PREFIX)
    }
    name = value.get("id")
    if name is None or name == "":
        name = _hash(rest, metadata)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise DataError(f"{where}: id is {name!r}", hint="use a string or an integer")
    return Task(id=str(name), input=rest, metadata=metadata)


def _metadata(row: Mapping[str, JSON], where: str) -> dict[str, JSON]:
    """What a row says to the grader only; a text is read as JSON, for formats of plain texts."""
    value = row.get("metadata")
    if value is None or value == "":
        value = {}
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise DataError(f"{where}: metadata is no JSON ({error})", hint="write {…}") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"{where}: metadata is a {kind}, not an object", hint="write {…}")
    single = {key.removeprefix(_PREFIX): row[key] for key in row if key.startswith(_PREFIX)}
    if twice := single.keys() & value.keys():
        raise DataError(
            f"{where}: metadata has {min(twice)!r} twice", hint=f"leave out {_PREFIX}{min(twice)}"
        )
    return {**value, **single}


def _hash(value: JSON, metadata: Mapping[str, JSON]) -> str:
    # Sorted: formats and writers keep the order of keys, or do not.
    text = json.dumps([value, metadata], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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


class Upcoming(Iterator[Task]):
    """Tasks in order, of which the next ones can be looked at before they are drawn.

    >>> order = Upcoming(iter([Task(id="a", input=1), Task(id="b", input=2)]))
    >>> order.peek(1)[0].id, next(order).id, next(order).id
    ('a', 'a', 'b')
    """

    def __init__(self, order: Iterator[Task]) -> None:
        self._order = order
        self._seen: deque[Task] = deque()

    def __next__(self) -> Task:
        return self._seen.popleft() if self._seen else next(self._order)

    def peek(self, count: int) -> list[Task]:
        """The next tasks, fewer where the order ends."""
        self._seen.extend(islice(self._order, max(0, count - len(self._seen))))
        return list(islice(self._seen, count))
