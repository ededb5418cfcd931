"""Questions about small databases, made from templates: the tasks of SQL-mini.

    python tasks.py --databases databases --count 4000 --seed 0 --split train --out train.jsonl

Five subjects, each with one table of things, one of the groups they belong to, and several SQLite
files that differ in their rows. Training and held-out questions can never coincide: a hash of the
question decides which of the two it may be used for.
"""

import argparse
import functools
import hashlib
import json
import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from database import Row, Rows, run_query
from grader import same

Split = Literal["train", "val"]

NAMES = (
    "Ana", "Ben", "Eva", "Leo", "Mia", "Sam", "Zoe", "Max", "Ida", "Kim",
    "Jon", "Amy", "Dan", "Liz", "Roy", "Tom", "Ray", "Joy", "Ian", "Fay",
    "Gus", "Hal", "Ivy", "Jim", "Kai", "Lea", "Ned", "Ola", "Pam", "Rex",
)  # fmt: skip
DATABASES_PER_SUBJECT = 6
ROWS = 10


@dataclass(frozen=True)
class Subject:
    """A table of named things with a group and two numbers each, and a table of the groups."""

    things: str
    group: str
    numbers: tuple[str, str]
    groups: str
    fact: str
    """The groups table's other column."""
    values: tuple[str, ...]
    facts: tuple[str, ...]

    @property
    def schema(self) -> str:
        """As the agent sees it."""
        columns = ", ".join(("name", self.group, *self.numbers))
        return f"{self.things}({columns})\n{self.groups}({self.group}, {self.fact})"


SUBJECTS = (
    Subject("singers", "land", ("age", "songs"), "lands", "king",
            ("Peru", "Chad", "Cuba", "Iran"), ("Otto", "Abel", "Hugo", "Karl")),
    Subject("players", "team", ("goals", "height"), "teams", "coach",
            ("Reds", "Jets", "Owls", "Bulls"), ("Vera", "Nina", "Tara", "Dora")),
    Subject("books", "genre", ("pages", "price"), "genres", "shelf",
            ("crime", "poetry", "travel", "humour"), ("north", "south", "east", "west")),
    Subject("dogs", "breed", ("weight", "litters"), "breeds", "origin",
            ("beagle", "poodle", "husky", "collie"), ("Spain", "Japan", "Wales", "Egypt")),
    Subject("ships", "port", ("speed", "crew"), "ports", "mayor",
            ("Oslo", "Riga", "Lima", "Doha"), ("Emil", "Igor", "Knut", "Lars")),
)  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """A row of a subject's first table."""

    name: str
    group: str
    numbers: tuple[int, int]


@dataclass(frozen=True)
class World:
    """A subject with rows: what one SQLite file holds."""

    subject: Subject
    number: int
    things: tuple[Thing, ...]
    facts: tuple[tuple[str, str], ...]

    @property
    def file(self) -> str:
        return f"{self.subject.things}-{self.number}.sqlite"


@functools.cache
def world(subject: Subject, number: int) -> World:
    """The same rows for the same number, always; numbers in a column are all different."""
    rng = random.Random(f"{subject.things} {number}")
    columns = [rng.sample(range(11, 99), ROWS) for _ in subject.numbers]
    names = rng.sample(NAMES, ROWS)
    groups = [subject.values[n % len(subject.values)] for n in range(ROWS)]
    things = zip(names, groups, zip(*columns, strict=True), strict=True)
    facts = tuple(zip(subject.values, rng.sample(subject.facts, len(subject.facts)), strict=True))
    rows = [Thing(name, group, (first, second)) for name, group, (first, second) in things]
    rng.shuffle(rows)
    return World(subject, number, tuple(rows), facts)


def make_databases(folder: Path) -> None:
    """Write every world as a SQLite file."""
    folder.mkdir(parents=True, exist_ok=True)
    for subject in SUBJECTS:
        for number in range(DATABASES_PER_SUBJECT):
            _write(world(subject, number), folder)


def _write(made: World, folder: Path) -> None:
    subject, path = made.subject, folder / made.file
    path.unlink(missing_ok=True)
    first, second = subject.numbers
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            f"CREATE TABLE {subject.things} "
            f"(name TEXT PRIMARY KEY, {subject.group} TEXT, {first} INTEGER, {second} INTEGER)"
        )
        connection.execute(
            f"CREATE TABLE {subject.groups} ({subject.group} TEXT PRIMARY KEY, {subject.fact} TEXT)"
        )
        connection.executemany(
            f"INSERT INTO {subject.things} VALUES (?, ?, ?, ?)",  # noqa: S608 - our own names
            [(thing.name, thing.group, *thing.numbers) for thing in made.things],
        )
        connection.executemany(
            f"INSERT INTO {subject.groups} VALUES (?, ?)",  # noqa: S608
            made.facts,
        )


@dataclass(frozen=True)
class Template:
    """A wording and the query it asks for, with the same blanks."""

    wording: str
    query: str

    @property
    def literal(self) -> str:
        """Which literal it asks with: a `name`, a `value` of the group column, or a `limit`."""
        return next(kind for kind in ("name", "value", "limit") if f"{{{kind}}}" in self.wording)


TEMPLATES = {
    "value_of": Template(
        "What is the {column} of '{name}'?",
        "SELECT {column} FROM {things} WHERE name = '{name}'",
    ),
    "fact_of": Template(
        "What is the {fact} for '{name}'?",
        "SELECT {fact} FROM {things} JOIN {groups} USING ({group}) WHERE name = '{name}'",
    ),
    "members": Template(
        "Which {things} have {group} '{value}'?",
        "SELECT name FROM {things} WHERE {group} = '{value}'",
    ),
    "count": Template(
        "How many {things} have {group} '{value}'?",
        "SELECT COUNT(*) FROM {things} WHERE {group} = '{value}'",
    ),
    "largest": Template(
        "Of {things} with {group} '{value}', what is the largest {column}?",
        "SELECT MAX({column}) FROM {things} WHERE {group} = '{value}'",
    ),
    "smallest": Template(
        "Of {things} with {group} '{value}', what is the smallest {column}?",
        "SELECT MIN({column}) FROM {things} WHERE {group} = '{value}'",
    ),
    "average": Template(
        "Of {things} with {group} '{value}', what is the average {column}?",
        "SELECT AVG({column}) FROM {things} WHERE {group} = '{value}'",
    ),
    "total": Template(
        "Of {things} with {group} '{value}', what is the total {column}?",
        "SELECT SUM({column}) FROM {things} WHERE {group} = '{value}'",
    ),
    "sort": Template(
        "List {things} with {group} '{value}' in order of {column}.",
        "SELECT name FROM {things} WHERE {group} = '{value}' ORDER BY {column}",
    ),
    "first": Template(
        "Of {things} with {group} '{value}', who leads by {column}?",
        "SELECT name FROM {things} WHERE {group} = '{value}' ORDER BY {column} DESC LIMIT 1",
    ),
    "above": Template(
        "Which {things} have {column} above {limit}?",
        "SELECT name FROM {things} WHERE {column} > {limit}",
    ),
    "below": Template(
        "Which {things} have {column} below {limit}?",
        "SELECT name FROM {things} WHERE {column} < {limit}",
    ),
    "count_above": Template(
        "How many {things} have {column} above {limit}?",
        "SELECT COUNT(*) FROM {things} WHERE {column} > {limit}",
    ),
    "per_group": Template(
        "For each {group}, how many {things} have {column} above {limit}?",
        "SELECT {group}, COUNT(*) FROM {things} WHERE {column} > {limit} GROUP BY {group}",
    ),
}


@dataclass(frozen=True)
class Question:
    """A question about a world: a template with its blanks filled."""

    template: str
    world: World
    column: str
    """The column of numbers it is about, if it is about one."""
    literal: str
    """The name, value or number that stands in it."""

    def fill(self, text: str, column: str | None = None) -> str:
        """A template's text with this question's words in its blanks."""
        subject = self.world.subject
        return text.format(
            things=subject.things,
            group=subject.group,
            groups=subject.groups,
            fact=subject.fact,
            column=column or self.column,
            **dict.fromkeys(("name", "value", "limit"), self.literal),
        )

    @property
    def text(self) -> str:
        return self.fill(TEMPLATES[self.template].wording)

    @property
    def query(self) -> str:
        """The right one."""
        return self.fill(TEMPLATES[self.template].query)

    def rivals(self) -> set[str]:
        """Queries of the same literal that ask for something else.

        What merely sorts the right rows is right as well, where no order is asked for.
        """
        kind = TEMPLATES[self.template].literal == "limit"
        alike = [t.query for t in TEMPLATES.values() if (t.literal == "limit") == kind]
        numbers = self.world.subject.numbers
        filled = {self.fill(query, column) for query in alike for column in numbers}
        return {query for query in filled if not query.startswith(self.query)}


def questions(seed: int, split: Split, folder: Path) -> Iterator[Question]:
    """Yield questions of one split for ever, all templates alike often.

    A question is passed over when a query that asks for something else happens to return the same,
    as one that sorts by the other column may.
    """
    rng = random.Random(seed)
    while True:
        template = rng.choice(list(TEMPLATES))
        while not _fit(question := _draw(rng, template), split, folder):
            pass
        yield question


def _draw(rng: random.Random, template: str) -> Question:
    subject = rng.choice(SUBJECTS)
    made = world(subject, rng.randrange(DATABASES_PER_SUBJECT))
    which, thing = rng.randrange(2), rng.choice(made.things)
    numbers = sorted(thing.numbers[which] for thing in made.things)
    free = sorted(set(range(numbers[0] + 1, numbers[-1])) - set(numbers))
    literal = {"name": thing.name, "value": thing.group, "limit": str(rng.choice(free))}
    kind = TEMPLATES[template].literal
    return Question(template, made, subject.numbers[which], literal[kind])


@functools.cache
def _fit(question: Question, split: Split, folder: Path) -> bool:
    return split_of(question.text) == split and unambiguous(question, folder)


def unambiguous(question: Question, folder: Path) -> bool:
    """Whether only the right query returns the right result."""
    file = folder / question.world.file
    right = _rows(file, question.query)
    wrong = [_rows(file, query) for query in question.rivals()]
    ordered = "ORDER BY" in question.query
    return bool(right) and not any(same(right, rows, ordered=ordered) for rows in wrong)


@functools.cache
def _rows(file: Path, query: str) -> Sequence[Row]:
    result = run_query(file, query)
    assert isinstance(result, Rows), f"{file}: {query}: {result}"
    return result.rows


def split_of(text: str) -> Split:
    """The split a question belongs to: one in five is held out."""
    return "val" if hashlib.sha256(text.encode()).digest()[0] % 5 == 0 else "train"


def write_tasks(out: Path, *, count: int, seed: int, split: Split, folder: Path) -> None:
    """Write different questions, as tasks, and the databases that they need."""
    if not (folder / world(SUBJECTS[0], 0).file).exists():
        make_databases(folder)
    seen: set[Question] = set()
    with out.open("w", encoding="utf-8") as file:
        for question in questions(seed, split, folder):
            if question in seen:
                continue
            seen.add(question)
            line = {
                "id": f"{split}-{seed}-{len(seen) - 1}",
                "question": question.text,
                "schema": question.world.subject.schema,
                "database": str(folder.resolve() / question.world.file),
                "metadata": {"query": question.query, "template": question.template},
            }
            file.write(json.dumps(line) + "\n")
            if len(seen) == count:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SQL-mini tasks as JSONL.")
    parser.add_argument("--databases", type=Path, required=True, help="folder of SQLite files")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("train", "val"), default="train")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_tasks(
        options.out,
        count=options.count,
        seed=options.seed,
        split=options.split,
        folder=options.databases,
    )


if __name__ == "__main__":
    main()
