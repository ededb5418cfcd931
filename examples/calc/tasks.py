"""Word problems of one or two steps, made from templates: the tasks of Calc-mini.

    python tasks.py --count 4000 --seed 0 --split train --out train.jsonl

Training and held-out questions can never coincide: a hash of the question decides which of the two
it may be used for.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "val"]

NAMES = [
    "Tom",
    "Ana",
    "Ben",
    "Eva",
    "Leo",
    "Mia",
    "Sam",
    "Zoe",
    "Max",
    "Ida",
    "Kim",
    "Jon",
    "Amy",
    "Dan",
    "Liz",
    "Roy",
]
THINGS = ["apples", "pens", "books", "coins", "eggs", "cards", "stamps", "shells", "beads", "nuts"]


@dataclass(frozen=True)
class Problem:
    """A question, the numbers in it in order, and the answer."""

    question: str
    numbers: tuple[int, ...]
    answer: int


@dataclass(frozen=True)
class Cast:
    """Who and what a problem is about."""

    one: str
    two: str
    thing: str


Template = Callable[[random.Random, Cast], Problem]


def find(rng: random.Random, cast: Cast) -> Problem:
    a, b = _number(rng), _number(rng)
    text = f"{cast.one} has {a} {cast.thing} and finds {b} more. How many {cast.thing} now?"
    return Problem(text, (a, b), a + b)


def give(rng: random.Random, cast: Cast) -> Problem:
    b, a = sorted((_number(rng), _number(rng)))
    text = f"{cast.one} had {a} {cast.thing} and gave {b} to {cast.two}. How many are left?"
    return Problem(text, (a, b), a - b)


def boxes(rng: random.Random, cast: Cast) -> Problem:
    a, b = _number(rng), _small(rng)
    text = f"{cast.one} buys {a} boxes with {b} {cast.thing} in each box. How many {cast.thing}?"
    return Problem(text, (a, b), a * b)


def share(rng: random.Random, cast: Cast) -> Problem:
    each, friends = _number(rng), _small(rng)
    total = each * friends
    text = f"{cast.one} shares {total} {cast.thing} equally among {friends} friends. How many each?"
    return Problem(text, (total, friends), each)


def fewer(rng: random.Random, cast: Cast) -> Problem:
    b, a = sorted((_number(rng), _number(rng)))
    text = (
        f"{cast.one} has {a} {cast.thing}. {cast.two} has {b} fewer. How many does {cast.two} have?"
    )
    return Problem(text, (a, b), a - b)


def older(rng: random.Random, cast: Cast) -> Problem:
    a, b = _number(rng), _number(rng)
    text = (
        f"{cast.one} has {a} {cast.thing}. {cast.two} has {b} more than that. "
        f"How many does {cast.two} have?"
    )
    return Problem(text, (a, b), a + b)


def times(rng: random.Random, cast: Cast) -> Problem:
    a, b = _number(rng), rng.randint(2, 9)
    text = (
        f"{cast.one} has {a} {cast.thing}. {cast.two} has {b} times as many. "
        f"How many does {cast.two} have?"
    )
    return Problem(text, (a, b), a * b)


def part(rng: random.Random, cast: Cast) -> Problem:
    a, b = _number(rng), rng.randint(2, 9)
    text = (
        f"{cast.one} has {a * b} {cast.thing}, {b} times as many as {cast.two}. "
        f"How many does {cast.two} have?"
    )
    return Problem(text, (a * b, b), a)


def days(rng: random.Random, cast: Cast) -> Problem:
    a, b, c = _number(rng), _number(rng), _number(rng)
    text = f"{cast.one} saw {a} {cast.thing} on Monday, {b} on Tuesday and {c} on Friday. In all?"
    return Problem(text, (a, b, c), a + b + c)


def lost(rng: random.Random, cast: Cast) -> Problem:
    left, b, c = _number(rng), _number(rng), _number(rng)
    total = left + b + c
    text = (
        f"{cast.one} had {total} {cast.thing}, gave {b} to {cast.two} and lost {c}. "
        "How many are left?"
    )
    return Problem(text, (total, b, c), left)


def bags(rng: random.Random, cast: Cast) -> Problem:
    a, b, c = _number(rng), _small(rng), _number(rng)
    text = (
        f"{cast.one} packs {a} bags of {b} {cast.thing} and finds {c} more. "
        f"How many {cast.thing} in total?"
    )
    return Problem(text, (a, b, c), a * b + c)


def broken(rng: random.Random, cast: Cast) -> Problem:
    a, b = _number(rng), _small(rng)
    c = rng.randint(2, a)
    text = (
        f"{cast.one} packs {a} bags of {b} {cast.thing} and then loses {c}. "
        f"How many {cast.thing} remain?"
    )
    return Problem(text, (a, b, c), a * b - c)


TEMPLATES: tuple[Template, ...] = (
    find,
    give,
    boxes,
    share,
    fewer,
    older,
    times,
    part,
    days,
    lost,
    bags,
    broken,
)


def problems(seed: int, split: Split) -> Iterator[Problem]:
    """Yield different problems of one split for ever, templates in random order."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        one, two = rng.sample(NAMES, 2)
        problem = rng.choice(TEMPLATES)(rng, Cast(one, two, rng.choice(THINGS)))
        if split_of(problem.question) == split and problem.question not in seen:
            seen.add(problem.question)
            yield problem


def split_of(question: str) -> Split:
    """The split a question belongs to: one in five is held out."""
    return "val" if hashlib.sha256(question.encode()).digest()[0] % 5 == 0 else "train"


def _number(rng: random.Random) -> int:
    return rng.randint(2, 99)


def _small(rng: random.Random) -> int:
    return rng.randint(2, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write Calc-mini tasks as JSONL.")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("train", "val"), default="train")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8") as file:
        source = problems(options.seed, options.split)
        for number, problem in zip(range(options.count), source, strict=False):
            line = {
                "id": f"{options.split}-{options.seed}-{number}",
                "question": problem.question,
                "metadata": {"answer": problem.answer},
            }
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
