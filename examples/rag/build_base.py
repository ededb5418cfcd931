"""Build the tiny base model of RAG-mini from nothing: tokenizer, weights, warm start.

    python build_base.py --out base            # 7 minutes of one core

The warm start teaches the format and the copying of names, never the task. Its conversations search
for a random word of the question beside a random name, and answer with a name that was found or
asked about; every few hundred are about another world, so there is nothing in them to remember. So
the model searches flawlessly and is right by luck, about one time in thirty; whatever it gets right
later, it learned from reward.
"""

import argparse
import random
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from retrieval import Bm25, Index
from tasks import NAMES, WORDS, Question, World

from warm_start import (
    PROMPT_WEIGHT,
    Chat,
    Conversation,
    add_whole,
    boilerplate,
    build_model,
    in_batches,
    joined,
    save,
    tokenizer_core,
    warm_start,
    wrapped,
)

HERE = Path(__file__).resolve().parent
INSTRUCTIONS = (
    "Answer the question with what you find. Search for one fact at a time until you know enough; "
    "then reply with the answer alone, in a few words: <answer>the answer</answer>."
)
PASSAGES = 2
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find the passages that fit a query best.",
        "strict": False,
        "parameters": {
            "properties": {"query": {"title": "Query", "type": "string"}},
            "required": ["query"],
            "title": "search_args",
            "type": "object",
        },
    },
}
"""The tool as the agent's framework describes it (a test compares the two)."""

CALL = ('\n{"name": "search", "arguments": {"query": "', '"}}\n')
FIXED = ("system\n", "assistant\n", "<answer>", "</answer>", ".\n-", *CALL)
"""What is one token because it is always the same: short conversations are learned sooner."""
WORLDS = 1000
"""Seeds of the warm start's worlds begin here; the tasks' world is another."""
RESULT = ("\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n")


@dataclass(frozen=True, slots=True)
class Attempt:
    """What somebody does who knows how to search, and not what for."""

    question: str
    searches: list[tuple[str, str]]
    """Queries and what they found."""
    answer: str


@dataclass(frozen=True, slots=True)
class Lesson:
    """A part of the warm start, and how its attempts are drawn."""

    steps: int
    rate: float
    """Learning rate at its peak."""
    new: bool
    """Follow, and answer with, only names that were not searched for before."""
    echo: float
    """How often the answer is the name that was last searched for."""


LESSONS = (
    Lesson(1500, 3e-3, new=False, echo=0.0),
    Lesson(600, 2e-3, new=True, echo=0.0),
    Lesson(150, 1e-3, new=True, echo=0.6),
)
"""First any name is copied, as often as it was seen; but the company's is seen most, and would be
all that is ever searched for. So then new ones only. After these two, the likeliest answer is right
for one question of six; the third makes it a name that was asked about, which is never right."""


def names_in(text: str) -> list[str]:
    """The names of a text, in order.

    >>> names_in("- The founder of Bagen is Yosha.")
    ['Bagen', 'Yosha']
    """
    return [word for word in re.findall(r"[A-Z][a-z]+", text) if word in NAMES]


def found(index: Index, query: str) -> str:
    """What the agent's tool says to a query."""
    return "\n".join(f"- {passage}" for passage in index.search(query, PASSAGES))


def random_attempt(
    rng: random.Random, index: Index, question: Question, lesson: Lesson = LESSONS[-1]
) -> Attempt:
    """Searches and an answer, drawn from the words at hand.

    The word of a query is mostly one that the question has. Its name, and the answer, is any that
    the passages have brought up.
    """
    asked = (question.role.word, question.life.word)
    name, names, used, searches = "", [question.company], set(), []
    for _ in range(rng.choices((1, 2, 3), (0.1, 0.8, 0.1))[0]):
        word, name = rng.choice(asked if rng.random() < 0.9 else WORDS), rng.choice(names)
        searches.append((f"{word} {name}", found(index, f"{word} {name}")))
        used.add(name)
        names = _choice([text for _, text in searches], used if lesson.new else ())
    if lesson.echo and rng.random() < lesson.echo:
        names = [name]
    elif rng.random() < 0.7:
        names = _choice([searches[-1][1]], used if lesson.new else ())
    return Attempt(question.text, searches, rng.choice(names))


def _choice(texts: list[str], used: Collection[str]) -> list[str]:
    """The names of texts without those used, if any remain."""
    names = names_in("\n".join(texts))
    return [name for name in names if name not in used] or names


class Format(Chat):
    """Conversations as the gateway renders them."""

    def prompt(self, question: str) -> list[int]:
        """The first request."""
        return self.request(INSTRUCTIONS, question, SEARCH)

    def conversation(self, attempt: Attempt) -> Conversation:
        """Question, calls with their results, answer."""
        parts = [(self.prompt(attempt.question), PROMPT_WEIGHT)]
        for query, found in attempt.searches:
            call = f"<tool_call>{CALL[0]}{query}{CALL[1]}</tool_call><|im_end|>"
            returned = f"{RESULT[0]}{found}{RESULT[1]}<|im_start|>assistant\n"
            parts += [(self.encode(call), 1.0), (self.encode(returned), PROMPT_WEIGHT)]
        # The blank makes the name the same token as in the passages.
        parts.append((self.encode(f"<answer> {attempt.answer}</answer><|im_end|>"), 1.0))
        return joined(parts)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Names and words of questions and passages as single tokens, the tool preamble in a few."""
    texts = []
    for seed in range(8):
        world = World(WORLDS + seed)
        texts += [f"- {passage}\n" for passage in world.passages]
        texts += [question.text for question in world.questions()]
    texts += [word for word in WORDS for _ in range(50)]  # as a query begins: without a blank
    words = r" ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]|\s"
    core = tokenizer_core(texts, words=words, vocab_size=1200, min_frequency=2)
    plain = wrapped(core, HERE)
    prompt = str(plain.decode(Format(plain).prompt("QUESTION")))
    add_whole(core, [*boilerplate(prompt, "QUESTION", longer_than=8), *FIXED])
    return wrapped(core, HERE)


def batches(form: Format, size: int, seed: int, lesson: Lesson) -> Iterator[list[Conversation]]:
    """Conversations for ever, those of similar length together; every eight batches a new world."""
    rng, number = random.Random(seed), WORLDS
    while True:
        number += 1
        world = World(number)
        index, questions = Bm25(world.passages), list(world.questions())
        chosen = (rng.choice(questions) for _ in range(8 * size))
        pool = [form.conversation(random_attempt(rng, index, q, lesson)) for q in chosen]
        yield from in_batches(pool, size, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the base model of RAG-mini.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, intermediate_size=256)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens")
    for number, lesson in enumerate(LESSONS):
        source = batches(Format(tokenizer), options.size, options.seed + number, lesson)
        warm_start(model, source, steps=lesson.steps, rate=lesson.rate)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
