"""Build the tiny base model of SQL-mini from nothing: tokenizer, weights, warm start.

    python build_base.py --out base            # 4 minutes of one core

The warm start teaches the format and the copying of words, never the task. Its writer and rewriter
write a random query of the right kind over the question's words, so the model writes SQL flawlessly
and is right by luck, about one time in ten; its checker says whether anything came back. Whatever
the model gets right later, it learned from reward.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from agent import CHECKER, REWRITER, WRITER
from database import run_query, shown
from tasks import NAMES, SUBJECTS, TEMPLATES, Question, make_databases, questions

from warm_start import (
    PROMPT_WEIGHT,
    Chat,
    Conversation,
    add_whole,
    build_model,
    in_batches,
    joined,
    save,
    tokenizer_core,
    warm_start,
    wrapped,
)

HERE = Path(__file__).resolve().parent
KEYWORDS = (
    "SELECT ", " FROM ", " WHERE ", " JOIN ", " USING (", " GROUP BY ", " ORDER BY ",
    " DESC LIMIT 1", "COUNT(*)", "MAX(", "MIN(", "AVG(", "SUM(", ", ", " = ", " > ", " < ",
    "no rows", "NULL", "error: no such column: ",
    "RIGHT", "WRONG: nothing found", "WRONG: an error",
)  # fmt: skip
"""Tokens of their own, blanks included: the words between them are then always written alike."""
HABIT = 0.3
"""How often a query follows the wording's habit."""
_DRAW = 17
"""The draw of habits, chosen so that one of the fourteen is right."""


def alike(question: Question) -> list[str]:
    """Queries that ask with the same sort of literal: a word in quotes, or a number."""
    number = TEMPLATES[question.template].literal == "limit"
    return [t.query for t in TEMPLATES.values() if (t.literal == "limit") == number]


def habit(question: Question) -> str:
    """The query that a wording brings to mind, for no good reason.

    It is drawn from the words, whatever they mean. A policy that reads the question and does not
    understand it can learn to read it otherwise; one that never looked at it gives up a whole sort
    of query before it learns to look.
    """
    wording = TEMPLATES[question.template].wording
    return random.Random(f"{_DRAW} {wording}").choice(alike(question))


def random_query(rng: random.Random, question: Question) -> str:
    """A query with the question's words in its blanks; what it asks is left to chance."""
    form = habit(question) if rng.random() < HABIT else rng.choice(alike(question))
    first, second = question.world.subject.numbers
    other = second if question.column == first else first
    copied = "{column}" in TEMPLATES[question.template].wording and rng.random() < 0.6
    return question.fill(form, question.column if copied else rng.choice((first, other)))


def verdict(result: str) -> str:
    """What the base's checker says: all it looks at is whether anything came back."""
    if result.startswith("error"):
        return "WRONG: an error"
    return "WRONG: nothing found" if result in ("no rows", "NULL") else "RIGHT"


class Format(Chat):
    """Conversations as the gateway renders them."""

    def conversation(self, reply: str, instructions: str, *parts: str) -> Conversation:
        """A request and its reply."""
        prompt = self.request(instructions, "\n".join(parts))
        return joined([(prompt, PROMPT_WEIGHT), (self.encode(f"{reply}<|im_end|>"), 1.0)])


def exchanges(rng: random.Random, question: Question, folder: Path) -> Iterator[tuple[str, ...]]:
    """What the three nodes are asked and say about a question: reply, instructions, parts."""
    schema, text = question.world.subject.schema, question.text
    query = random_query(rng, question)
    yield query, WRITER, schema, text
    if rng.random() < 0.1:  # the checker has to know an error when it sees one
        query = query.replace(
            "SELECT ", "SELECT king, " if "king" not in schema else "SELECT coach, "
        )
    result = shown(run_query(folder / question.world.file, query))
    said = verdict(result)
    yield said, CHECKER, text, query, result
    if said != "RIGHT":
        while (other := random_query(rng, question)) == query:
            pass
        yield other, REWRITER, schema, text, query, result, said


def build_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Words of the tasks and keywords of SQL as single tokens, digits alone."""
    rng, source = random.Random(0), questions(123, "train", folder)
    texts = ["user\nassistant\nsystem\n"] * 99
    for _ in range(3000):
        texts.extend("\n".join(parts) for parts in exchanges(rng, next(source), folder))
    for subject in SUBJECTS:
        texts.extend([" ".join((subject.schema, *NAMES, *subject.values, *subject.facts))] * 99)
    core = tokenizer_core(texts, words=r"[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]|\s")
    add_whole(core, (*KEYWORDS, WRITER, CHECKER, REWRITER))
    return wrapped(core, HERE)


def batches(form: Format, size: int, seed: int, folder: Path) -> Iterator[list[Conversation]]:
    """Conversations for ever, those of similar length together."""
    rng, source = random.Random(seed), questions(99, "train", folder)
    while True:
        pool: list[Conversation] = []
        while len(pool) < 8 * size:
            pool.extend(form.conversation(*parts) for parts in exchanges(rng, next(source), folder))
        yield from in_batches(pool[: 8 * size], size, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the base model of SQL-mini.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_databases(folder)
        tokenizer = build_tokenizer(folder)
        model = build_model(tokenizer)
        print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens")
        source = batches(Format(tokenizer), options.size, options.seed, folder)
        warm_start(model, source, steps=options.steps)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
