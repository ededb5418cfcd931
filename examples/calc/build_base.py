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
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from renderers import Qwen3RendererConfig, create_renderer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from plain_agent import CALCULATOR, INSTRUCTIONS, calculator
from tasks import NAMES, THINGS, Problem, problems

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CALL = ('{"name": "calculator", "arguments": {"expression": "', '"}}')
RESULT = ("\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n")
PROMPT_WEIGHT = 0.1
"""Weight of prompt tokens in the loss, beside 1 for the assistant's: copying emerges sooner."""


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


@dataclass(frozen=True)
class Conversation:
    """A whole conversation as tokens, each with its weight in the loss."""

    ids: list[int]
    weights: list[float]


class Format:
    """Conversations as the gateway renders them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._renderer = create_renderer(tokenizer, Qwen3RendererConfig())

    def prompt(self, question: str) -> list[int]:
        """The first request."""
        messages = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": question},
        ]
        return list(
            self._renderer.render_ids(
                messages,  # pyright: ignore[reportArgumentType] - its TypedDicts are stricter
                tools=[CALCULATOR],  # pyright: ignore[reportArgumentType]
                add_generation_prompt=True,
            )
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

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
        return Conversation(
            ids=[token for ids, _ in parts for token in ids],
            weights=[weight for ids, weight in parts for _ in ids],
        )


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
    core = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]|\s")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=5,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    plain = _wrap(core)
    core.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in _boilerplate(plain)]
    )
    return _wrap(core)


def _wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    template = Path(__file__).with_name("chat_template.jinja")
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _boilerplate(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The long fixed texts of a prompt with tools, cut where they vary."""
    text = str(tokenizer.decode(Format(tokenizer).prompt("QUESTION")))
    pieces = [p for p in re.split("|".join(map(re.escape, (*SPECIAL, "QUESTION"))), text) if p]
    first, *others = [piece for piece in pieces if len(piece) > 12]
    system, preamble = first.removeprefix("system\n").split("\n\n# Tools", 1)
    before, tool = preamble.split('{"type"', 1)
    tool, after = tool.split("\n</tools>", 1)
    return [system, "\n\n# Tools" + before, '{"type"' + tool, "\n</tools>" + after, *others, *CALL]


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3's architecture with 0.38 million weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=288,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=SPECIAL.index("<|im_end|>"),
            pad_token_id=SPECIAL.index("<|endoftext|>"),
        )
    ).eval()


def batches(form: Format, size: int, seed: int) -> Iterator[list[Conversation]]:
    """Conversations for ever, those of similar length together."""
    rng, source = random.Random(seed), problems(99, "train")
    while True:
        pool = []
        for _ in range(8 * size):
            problem = next(source)
            pool.append(form.conversation(problem, random_expression(rng, problem)))
        pool.sort(key=lambda conversation: len(conversation.ids))
        order = list(range(0, len(pool), size))
        rng.shuffle(order)
        for start in order:
            yield pool[start : start + size]


def warm_start(
    model: Qwen3ForCausalLM, form: Format, *, steps: int, size: int, seed: int, rate: float = 4e-3
) -> None:
    """Supervised training on `steps` batches."""
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    started, source = time.monotonic(), batches(form, size, seed)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * (1 - 0.95 * step / steps)
        loss, assistant = _loss(model, next(source))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 99 or step == steps - 1:
            seconds = time.monotonic() - started
            print(f"{step + 1:5d}/{steps}  assistant loss {assistant:.3f}  {seconds:.0f} s")


def _loss(model: Qwen3ForCausalLM, batch: list[Conversation]) -> tuple[torch.Tensor, float]:
    """Weighted cross-entropy, and its mean over the assistant's tokens."""
    width = max(len(c.ids) for c in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    weights = torch.zeros(len(batch), width)
    for row, conversation in enumerate(batch):
        ids[row, : len(conversation.ids)] = torch.tensor(conversation.ids)
        weights[row, : len(conversation.ids)] = torch.tensor(conversation.weights)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view(len(batch), -1)
    used = weights[:, 1:]
    spoken = used == 1.0
    mean = float(losses.detach()[spoken].mean())
    return (losses * used).sum() / used.sum(), mean


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
    warm_start(model, Format(tokenizer), steps=options.steps, size=options.size, seed=options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"written to {options.out}; measure it with fulmen eval")


if __name__ == "__main__":
    main()
