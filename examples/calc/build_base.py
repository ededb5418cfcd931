"""Build the tiny base model of Calc-mini from nothing: tokenizer, weights, warm start.

    python build_base.py --out base            # 10 minutes on one core

The warm start teaches the format and the copying of numbers, never the task. Its conversations call
the calculator with a random expression over the question's numbers. So the model calls the tool
flawlessly and is right by luck, about one time in ten; whatever it gets right later, it learned
from reward.
"""

import argparse
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from plain_agent import CALCULATOR, INSTRUCTIONS, calculator
from tasks import NAMES, THINGS, Problem, problems

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
CALL = ('{"name": "calculator", "arguments": {"expression": "', '"}}')
RESULT = ("\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n")
HABIT = 0.3
"""How often the first operator follows the wording's habit."""
_DRAW = 33
"""The draw of habits, chosen so that one of the twelve is right: a plain draw would get three
right, and the base would begin above one in ten."""


def habit(question: str) -> str:
    """The operator that a wording brings to mind, for no good reason.

    It is drawn from the words, whatever they mean. A policy that reads the question and does not
    understand it can learn to read it otherwise; one that never looked at it gives up a whole
    operator before it learns to look.
    """
    words = re.findall(r"[A-Za-z]+", question)
    wording = " ".join(word for word in words if word not in (*NAMES, *THINGS))
    return random.Random(f"{_DRAW} {wording}").choice("+-*/")


def random_expression(rng: random.Random, problem: Problem) -> str:
    """Numbers of the question between random operators.

    They mostly keep the question's order: were it random, a sum or a product would come out right
    twice as often as a difference or a quotient.
    """
    chosen = list(problem.numbers)
    if rng.random() < (0.3 if len(chosen) == 2 else 0.1):
        chosen = [rng.choice(chosen) for _ in range(rng.choice((2, 3)))]
    elif rng.random() < 0.05:
        rng.shuffle(chosen)
    first, *rest = map(str, chosen)
    operators = [rng.choice("+-*/") for _ in rest]
    if rng.random() < HABIT:
        operators[0] = habit(problem.question)
    parts = [first, *map("".join, zip(operators, rest, strict=True))]
    if len(parts) == 3 and rng.random() < 0.2:
        return f"({parts[0]}{parts[1]}){parts[2]}"
    return "".join(parts)


class Format(Chat):
    """Conversations as the gateway renders them."""

    def prompt(self, question: str) -> list[int]:
        """The first request."""
        return self.request(INSTRUCTIONS, question, CALCULATOR)

    def conversation(self, problem: Problem, expression: str) -> Conversation:
        """Question, call, result, answer."""
        result = calculator(expression)
        call = f"<tool_call>\n{CALL[0]}{expression}{CALL[1]}\n</tool_call><|im_end|>"
        returned = f"{RESULT[0]}{result}{RESULT[1]}<|im_start|>assistant\n"
        parts = (
            (self.prompt(problem.question), PROMPT_WEIGHT),
            (self.encode(call), 1.0),
            (self.encode(returned), PROMPT_WEIGHT),
            (self.encode(f"<answer>{result}</answer><|im_end|>"), 1.0),
        )
        return joined(parts)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the problems as single tokens, digits alone, the tool preamble in a few tokens."""
    rng, source = random.Random(0), problems(123, "train")
    texts = []
    for _ in range(3000):
        problem = next(source)
        result = calculator(random_expression(rng, problem))
        texts.append(
            f"{problem.question} {result}\n<answer>{result}</answer>\nuser\nassistant\nsystem\n"
        )
    core = tokenizer_core(texts, words=r" ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]|\s")
    plain = wrapped(core, HERE)
    prompt = str(plain.decode(Format(plain).prompt("QUESTION")))
    add_whole(core, [*boilerplate(prompt, "QUESTION", longer_than=12), *CALL])
    return wrapped(core, HERE)


def batches(form: Format, size: int, seed: int) -> Iterator[list[Conversation]]:
    """Conversations for ever, those of similar length together."""
    rng, source = random.Random(seed), problems(99, "train")
    while True:
        pool = []
        for _ in range(8 * size):
            problem = next(source)
            pool.append(form.conversation(problem, random_expression(rng, problem)))
        yield from in_batches(pool, size, rng)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the base model of Calc-mini.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens")
    source = batches(Format(tokenizer), options.size, options.seed)
    warm_start(model, source, steps=options.steps)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
