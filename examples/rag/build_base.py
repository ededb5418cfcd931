"""Build the tiny base model of RAG-mini from nothing: tokenizer, weights, warm start.

    python build_base.py --out base            # 8 minutes of one core

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
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from renderers import Qwen3RendererConfig, create_renderer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from retrieval import Bm25, Index
from tasks import NAMES, WORDS, Question, World

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
CALL = ('\n{"name": "search", "arguments": {"query": "', '"}}\n')
FIXED = ("system\n", "assistant\n", "<answer>", "</answer>", ".\n-", *CALL)
"""What is one token because it is always the same: short conversations are learned sooner."""
WORLDS = 1000
"""Seeds of the warm start's worlds begin here; the tasks' world is another."""
RESULT = ("\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n")
PROMPT_WEIGHT = 0.1
"""Weight of prompt tokens in the loss, beside 1 for the assistant's: copying emerges sooner."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation as tokens, each with its weight in the loss."""

    ids: list[int]
    weights: list[float]


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
                tools=[SEARCH],  # pyright: ignore[reportArgumentType]
                add_generation_prompt=True,
            )
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def conversation(self, attempt: Attempt) -> Conversation:
        """Question, calls with their results, answer."""
        parts = [(self.prompt(attempt.question), PROMPT_WEIGHT)]
        for query, found in attempt.searches:
            call = f"<tool_call>{CALL[0]}{query}{CALL[1]}</tool_call><|im_end|>"
            returned = f"{RESULT[0]}{found}{RESULT[1]}<|im_start|>assistant\n"
            parts += [(self.encode(call), 1.0), (self.encode(returned), PROMPT_WEIGHT)]
        # The blank makes the name the same token as in the passages.
        parts.append((self.encode(f"<answer> {attempt.answer}</answer><|im_end|>"), 1.0))
        return Conversation(
            ids=[token for ids, _ in parts for token in ids],
            weights=[weight for ids, weight in parts for _ in ids],
        )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Names and words of questions and passages as single tokens, the tool preamble in a few."""
    texts = []
    for seed in range(8):
        world = World(WORLDS + seed)
        texts += [f"- {passage}\n" for passage in world.passages]
        texts += [question.text for question in world.questions()]
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
        vocab_size=1200,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts += [word for word in WORDS for _ in range(50)]  # as a query begins: without a blank
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
    first, *others = [piece for piece in pieces if len(piece) > 8]
    system, preamble = first.removeprefix("system\n").split("\n\n# Tools", 1)
    before, tool = preamble.split('{"type"', 1)
    tool, after = tool.split("\n</tools>", 1)
    return [system, "\n\n# Tools" + before, '{"type"' + tool, "\n</tools>" + after, *others, *FIXED]


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3's architecture with 0.4 million weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
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


def batches(form: Format, size: int, seed: int, lesson: Lesson) -> Iterator[list[Conversation]]:
    """Conversations for ever, those of similar length together; every eight batches a new world."""
    rng, number = random.Random(seed), WORLDS
    while True:
        number += 1
        world = World(number)
        index, questions = Bm25(world.passages), list(world.questions())
        chosen = (rng.choice(questions) for _ in range(8 * size))
        pool = [form.conversation(random_attempt(rng, index, q, lesson)) for q in chosen]
        pool.sort(key=lambda conversation: len(conversation.ids))
        order = list(range(0, len(pool), size))
        rng.shuffle(order)
        for start in order:
            yield pool[start : start + size]


def warm_start(model: Qwen3ForCausalLM, form: Format, lesson: Lesson, size: int, seed: int) -> None:
    """Supervised training on random attempts."""
    rate, steps = lesson.rate, lesson.steps
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    started, source = time.monotonic(), batches(form, size, seed, lesson)
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
    parser = argparse.ArgumentParser(description="Build the base model of RAG-mini.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens")
    for number, lesson in enumerate(LESSONS):
        warm_start(model, Format(tokenizer), lesson, options.size, options.seed + number)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"written to {options.out}; measure it with fulmen eval")


if __name__ == "__main__":
    main()
