"""Spider's execution match: does the query return what the reference query returns?

The rules are those of the test-suite evaluation (Zhong et al. 2020, arXiv 2010.02840; its function
`result_eq`), written anew from memory of it: rows are a multiset, in order only if the reference
says ORDER BY; columns may stand in any order; two empty results are equal. Unlike there, numbers
are equal to one in a million, and one database is asked, not a suite of them.
"""

from collections import Counter
from collections.abc import Sequence

from database import Failure, Row, run_query

TIMEOUT_S = 10.0
RELATIVE = 1e-6
ABSOLUTE = 1e-9


class BadTask(Exception):
    """The task's own reference query cannot be run."""


def score(task: dict, output: object) -> bool:
    """True if the query in `output` returns on `task["database"]` what `task["query"]` returns.

    Raises:
        BadTask: the reference query fails.
    """
    if not isinstance(output, str):
        return False
    reference = run_query(task["database"], task["query"], timeout_s=TIMEOUT_S)
    if isinstance(reference, Failure):
        raise BadTask(f"{task['database']}: the reference {task['query']!r}: {reference.reason}")
    answer = run_query(task["database"], output, timeout_s=TIMEOUT_S)
    if isinstance(answer, Failure):
        return False
    return same(reference.rows, answer.rows, ordered="order by" in task["query"].lower())


def same(reference: Sequence[Row], answer: Sequence[Row], *, ordered: bool) -> bool:
    """Whether two results are equal under some order of the columns, the same for all rows.

    >>> same([(1, "a"), (2, "b")], [("b", 2.0), ("a", 1.0)], ordered=False)
    True
    >>> same([(1, "a"), (2, "b")], [("b", 2.0), ("a", 1.0)], ordered=True)
    False
    >>> same([(1, 2), (2, 1)], [(1, 1), (2, 2)], ordered=False)
    False
    """
    if len(reference) != len(answer):
        return False
    if not reference:
        return True
    width = len(reference[0])
    if len(answer[0]) != width:
        return False
    names = _number_names([*reference, *answer])
    wanted, found = _named(reference, names), _named(answer, names)
    return _match(wanted, found, [], ordered=ordered)


def _match(
    wanted: Sequence[Row], found: Sequence[Row], chosen: list[int], *, ordered: bool
) -> bool:
    """Whether `chosen`, columns of `found` for the first of `wanted`, can be completed.

    Rows cut to the columns chosen so far must agree, which leaves few orders to try.
    """
    width = len(wanted[0])
    left = [row[: len(chosen)] for row in wanted]
    right = [tuple(row[column] for column in chosen) for row in found]
    agree = left == right if ordered else Counter(left) == Counter(right)
    if not agree or len(chosen) == width:
        return agree
    rest = (column for column in range(width) if column not in chosen)
    return any(_match(wanted, found, [*chosen, column], ordered=ordered) for column in rest)


def _number_names(rows: Sequence[Row]) -> dict[float, float]:
    """Every number's stand-in: the smallest number that it counts as equal to."""
    numbers = sorted({v for row in rows for v in row if isinstance(v, int | float)})
    names: dict[float, float] = {}
    first: float | None = None
    for number in numbers:
        if first is None or number - first > max(ABSOLUTE, RELATIVE * abs(number)):
            first = number
        names[number] = first
    return names


def _named(rows: Sequence[Row], names: dict[float, float]) -> list[Row]:
    """Rows with numbers replaced by their stand-ins; an int and its float are one number."""
    return [tuple(names[v] if isinstance(v, int | float) else v for v in row) for row in rows]
