"""Two-hop questions about a little made-up world: the tasks and the corpus of RAG-mini.

    python tasks.py --train train.jsonl --val val.jsonl --corpus corpus.jsonl

"Where was the founder of Velotex born?" takes two searches: who that founder is says one passage,
where that person was born another. A hash of the question decides whether it is used for training
or held out, so the two can never coincide.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retrieval import Passage, write_passages

Split = Literal["train", "val"]

_STARTS = (
    *("Ba", "Bel", "Cor", "Da", "Den", "El", "Fa", "Fen", "Gar", "Hal", "Jo", "Ka", "Lor"),
    *("Mar", "Mi", "Nel", "Or", "Pal", "Ro", "Sel", "Ta", "Ur", "Vel", "Yo", "Za"),
)
_ENDS = {
    "person": ("bin", "dra", "gan", "lia", "mon", "nis", "rik", "sha"),
    "company": ("cor", "dex", "gen", "lux", "mex", "tek"),
    "city": ("berg", "dale", "ford", "ton"),
}
COUNTS = {"company": 100, "person": 120, "city": 60}


def _names(kind: str) -> tuple[str, ...]:
    """All names of a kind, in an order that stays the same."""
    made = [start + end for start in _STARTS for end in _ENDS[kind]]
    random.Random(kind).shuffle(made)
    return tuple(sorted(made[: COUNTS[kind]]))


COMPANIES, PEOPLE, CITIES = _names("company"), _names("person"), _names("city")
NAMES = frozenset((*COMPANIES, *PEOPLE, *CITIES))


@dataclass(frozen=True, slots=True)
class Relation:
    """What is known of every company, or of every person."""

    word: str
    """The word that its passages and questions have in common."""
    fact: str
    """A passage about `one` and `other`."""
    others: tuple[str, ...]
    """What `other` may be."""
    question: str = ""
    """Of a person: how it is asked about `who`."""


ROLES = (
    Relation("founder", "The founder of {one} is {other}.", PEOPLE),
    Relation("director", "The director of {one} is {other}.", PEOPLE),
    Relation("owner", "The owner of {one} is {other}.", PEOPLE),
)
SEAT = Relation("seat", "The seat of {one} is {other}.", CITIES)
LIVES = (
    Relation("born", "{one} was born in {other}.", CITIES, "Where was {who} born?"),
    Relation("home", "{one} has a home in {other}.", CITIES, "Where is the home of {who}?"),
    Relation("school", "{one} went to school in {other}.", CITIES, "Where did {who} go to school?"),
    Relation("married", "{one} is married to {other}.", PEOPLE, "Who is {who} married to?"),
)
WORDS = tuple(relation.word for relation in (*ROLES, SEAT, *LIVES))


@dataclass(frozen=True, slots=True)
class Question:
    """A question of two hops, and what leads to its answer."""

    text: str
    company: str
    role: Relation
    person: str
    """The company's, in that role: nothing in the question names it."""
    life: Relation
    answer: str


class World:
    """Who founded what, and was born where: drawn at random, the same for a seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._known: dict[tuple[str, str], str] = {}
        """By subject and word."""
        self.passages: list[Passage] = []
        for subjects, relations in ((COMPANIES, (*ROLES, SEAT)), (PEOPLE, LIVES)):
            for one in subjects:
                # All different, so that no fact about a subject can stand for another.
                free = {
                    kind: rng.sample([name for name in kind if name != one], len(relations))
                    for kind in (PEOPLE, CITIES)
                }
                for relation in relations:
                    other = free[relation.others].pop()
                    self._known[one, relation.word] = other
                    text = relation.fact.format(one=one, other=other)
                    self.passages.append(Passage(one, text))
        rng.shuffle(self.passages)

    def questions(self) -> Iterator[Question]:
        """Every question that can be asked."""
        for company in COMPANIES:
            for role in ROLES:
                person = self._known[company, role.word]
                for life in LIVES:
                    text = life.question.format(who=f"the {role.word} of {company}")
                    answer = self._known[person, life.word]
                    yield Question(text, company, role, person, life, answer)


def split_of(question: str) -> Split:
    """The split a question belongs to: one in six is held out."""
    return "val" if hashlib.sha256(question.encode()).digest()[0] % 6 == 0 else "train"


def write_tasks(path: Path, questions: list[Question]) -> None:
    """Questions as Fulmen's tasks; the answer is for the grader only."""
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            line = {
                "id": f"{question.company}-{question.role.word}-{question.life.word}",
                "question": question.text,
                "metadata": {"answer": question.answer},
            }
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tasks and the corpus of RAG-mini.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    options = parser.parse_args()
    world = World(options.seed)
    questions = list(world.questions())
    random.Random(options.seed).shuffle(questions)
    for split, path in (("train", options.train), ("val", options.val)):
        write_tasks(path, [q for q in questions if split_of(q.text) == split])
    write_passages(options.corpus, world.passages)


if __name__ == "__main__":
    main()
