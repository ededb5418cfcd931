"""Build the tiny base model of SQL-mini from nothing: tokenizer, weights, warm start.

    python build_base.py --out base            # about 11 minutes on a busy core

The warm start teaches the format and the copying of words, never the task. Its writer and rewriter
write a random query of the right kind over the question's words, so the model writes SQL flawlessly
and is right by luck, about one time in ten; its checker says whether anything came back. Whatever
the model gets right later, it learned from reward.
"""

import argparse
import random
import sys
import tempfile
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
from agent import CHECKER, REWRITER, WRITER
from database import run_query, shown
from tasks import NAMES, SUBJECTS, TEMPLATES, Question, make_databases, questions

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
KEYWORDS = (
    "SELECT ", " FROM ", " WHERE ", " JOIN ", " USING (", " GROUP BY ", " ORDER BY ",
    " DESC LIMIT 1", "COUNT(*)", "MAX(", "MIN(", "AVG(", "SUM(", ", ", " = ", " > ", " < ",
    "no rows", "NULL", "error: no such column: ",
    "RIGHT", "WRONG: nothing found", "WRONG: an error",
)  # fmt: skip
"""Tokens of their own, blanks included: the words between them are then always written alike."""
PROMPT_WEIGHT = 0.1
"""Weight of prompt tokens in the loss, beside 1 for the assistant's: copying emerges sooner."""
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

    def prompt(self, instructions: str, *parts: str) -> list[int]:
        """A node's request."""
        messages = [
            {"role": "system", "content": instructions},
            {"role": "user", "content": "\n".join(parts)},
        ]
        return list(
            self._renderer.render_ids(
                messages,  # pyright: ignore[reportArgumentType] - its TypedDicts are stricter
                add_generation_prompt=True,
            )
        )

    def conversation(self, reply: str, instructions: str, *parts: str) -> Conversation:
        """A request and its reply."""
        prompt = self.prompt(instructions, *parts)
        said = self._tokenizer.encode(f"{reply}<|im_end|>", add_special_tokens=False)
        return Conversation(prompt + said, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(said))


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
    core = Tokenizer(models.BPE())
    words = Regex(r"[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]|\s")
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
    whole = (*KEYWORDS, WRITER, CHECKER, REWRITER)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in whole])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    template = Path(__file__).with_name("chat_template.jinja")
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3's architecture with 0.4 million weights."""
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


def batches(form: Format, size: int, seed: int, folder: Path) -> Iterator[list[Conversation]]:
    """Conversations for ever, those of similar length together."""
    rng, source = random.Random(seed), questions(99, "train", folder)
    while True:
        pool: list[Conversation] = []
        while len(pool) < 8 * size:
            pool.extend(form.conversation(*parts) for parts in exchanges(rng, next(source), folder))
        pool = sorted(pool[: 8 * size], key=lambda conversation: len(conversation.ids))
        order = list(range(0, len(pool), size))
        rng.shuffle(order)
        for start in order:
            yield pool[start : start + size]


def warm_start(
    model: Qwen3ForCausalLM, source: Iterator[list[Conversation]], *, steps: int, rate: float = 4e-3
) -> None:
    """Supervised training on `steps` batches."""
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    started = time.monotonic()
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
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"written to {options.out}; measure it with fulmen eval")


if __name__ == "__main__":
    main()
