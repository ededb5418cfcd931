"""What the examples' base models have in common: tokenizer, architecture, supervised warm start.

The conversations, which are all that such a model is taught, are each example's own business; see
the `build_base.py` of each.
"""

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from renderers import Qwen3RendererConfig, create_renderer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
PROMPT_WEIGHT = 0.1
"""Weight of prompt tokens in the loss, beside 1 for the assistant's: copying emerges sooner."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation as tokens, each with its weight in the loss."""

    ids: list[int]
    weights: list[float]


def joined(parts: Sequence[tuple[list[int], float]]) -> Conversation:
    """Parts in order, each with the weight of its tokens.

    >>> joined([([1, 2], 0.1), ([3], 1.0)])
    Conversation(ids=[1, 2, 3], weights=[0.1, 0.1, 1.0])
    """
    return Conversation(
        ids=[token for ids, _ in parts for token in ids],
        weights=[weight for ids, weight in parts for _ in ids],
    )


class Chat:
    """Texts and requests as the gateway renders them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._renderer = create_renderer(tokenizer, Qwen3RendererConfig())

    def request(
        self, system: str, user: str, tool: Mapping[str, object] | None = None
    ) -> list[int]:
        """A first request: two messages, and at most one tool."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return list(
            self._renderer.render_ids(
                messages,  # pyright: ignore[reportArgumentType] - its TypedDicts are stricter
                tools=[tool] if tool else None,  # pyright: ignore[reportArgumentType]
                add_generation_prompt=True,
            )
        )

    def encode(self, text: str) -> list[int]:
        """A text that goes on within a conversation."""
        return self._tokenizer.encode(text, add_special_tokens=False)


def tokenizer_core(
    texts: Sequence[str], *, words: str, vocab_size: int = 900, min_frequency: int = 5
) -> Tokenizer:
    """Byte-level BPE over pieces that the pattern `words` cuts out."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core


def add_whole(core: Tokenizer, texts: Sequence[str]) -> None:
    """Make each of these texts one token."""
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])


def wrapped(core: Tokenizer, folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer with the chat template of an example's folder."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def boilerplate(prompt: str, question: str, *, longer_than: int) -> list[str]:
    """The long fixed texts of a prompt with one tool, cut where they vary."""
    pieces = [p for p in re.split("|".join(map(re.escape, (*SPECIAL, question))), prompt) if p]
    first, *others = [piece for piece in pieces if len(piece) > longer_than]
    system, preamble = first.removeprefix("system\n").split("\n\n# Tools", 1)
    before, tool = preamble.split('{"type"', 1)
    tool, after = tool.split("\n</tools>", 1)
    return [system, "\n\n# Tools" + before, '{"type"' + tool, "\n</tools>" + after, *others]


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, intermediate_size: int = 288
) -> Qwen3ForCausalLM:
    """Qwen3's architecture with 0.4 million weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=intermediate_size,
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


def in_batches(
    pool: Sequence[Conversation], size: int, rng: random.Random
) -> Iterator[list[Conversation]]:
    """The conversations once, those of similar length together, batches in random order."""
    ordered = sorted(pool, key=lambda conversation: len(conversation.ids))
    starts = list(range(0, len(ordered), size))
    rng.shuffle(starts)
    for start in starts:
        yield ordered[start : start + size]


def warm_start(
    model: Qwen3ForCausalLM, source: Iterator[list[Conversation]], *, steps: int, rate: float = 4e-3
) -> None:
    """Supervised training on `steps` batches; the rate rises over 50 steps and falls to 5 %."""
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


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"written to {folder}; measure it with fulmen eval")
