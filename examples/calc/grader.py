"""Whether a calculator agent's answer is right."""

import math
import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")


def score(task: dict, output: object) -> bool:
    """True if the number in the last `<answer>…</answer>` is the expected one.

    Only a tagged answer counts: a text that lists many numbers must not be right by one of them.
    Commas in thousands and a unit after the number are allowed; equal means to one in a million.

    >>> score({"answer": 1200}, "so <answer>1,200 dollars</answer>")
    True
    >>> score({"answer": 1200}, "1200")
    False
    """
    number = answer_of(output)
    return number is not None and math.isclose(
        number, float(task["answer"]), rel_tol=1e-6, abs_tol=1e-9
    )


def answer_of(output: object) -> float | None:
    """The tagged number, or None if there is none."""
    tagged = _TAGGED.findall(output) if isinstance(output, str) else []
    found = _NUMBER.findall(tagged[-1]) if tagged else []
    if len(found) != 1 or len(found[0]) > 40:
        return None
    value = float(found[0].replace(",", ""))
    return value if math.isfinite(value) else None
