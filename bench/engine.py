"""Tokens per second of the local engine beside plain `transformers.generate`, on one CPU thread.

A Qwen3 of 5.25 million parameters with random weights, 200 different prompt tokens and 64 sampled
ones per request, temperature 1, log-probabilities of the sampled tokens. Then the workload of a
GRPO step on a tiny model: groups of eight with one prompt. Under three minutes:

    python bench/engine.py
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from fulmen.engine.platform import prepare_process

prepare_process(threads=1)

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from fulmen.engine.base import GenerateRequest
from fulmen.engine.pytorch.engine import LocalEngine
from results import alternate, result, seconds

PROMPT, NEW = 200, 64
CONCURRENCIES = (1, 8, 32, 64)


def build(hidden: int, layers: int, head_dim: int, vocab: int) -> Any:
    """A small Qwen3 with random weights: four heads, two of them for keys, tied embeddings."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def prompts(count: int, length: int, vocab: int, seed: int) -> Tensor:
    """(count, length) random token ids, other ones for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab, (count, length), generator=generator)


async def serve(engine: LocalEngine, rows: Sequence[Sequence[int]], new: int) -> int:
    """Complete all prompts at once after a weight update; returns how many tokens were sampled.

    The update empties the prefix cache, as every training step does, so that nothing of one
    measurement helps the next.
    """
    with engine.updating(engine.version + 1):
        pass

    async def one(number: int, ids: Sequence[int]) -> int:
        request = GenerateRequest(
            id=str(number), prompt_ids=tuple(ids), max_tokens=new, seed=number, stream=False
        )
        return sum([len(delta.token_ids) async for delta in engine.generate(request)])

    return sum(await asyncio.gather(*(one(n, ids) for n, ids in enumerate(rows))))


def peer_generate(model: Any, ids: Tensor) -> None:
    """The same work by transformers, batched."""
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            output_logits=True,
            return_dict_in_generate=True,
        )


def compare_with_transformers() -> dict[int, float]:
    """Print a result per concurrency; returns our tokens per second."""
    model, reference = build(256, 6, 64, 2048), build(256, 6, 64, 2048)
    engine = LocalEngine(model, name="bench", max_context=1024)
    speeds: dict[int, float] = {}
    for count in CONCURRENCIES:
        batches = {p: prompts(count, PROMPT, 2048, 1000 * count + p) for p in range(-1, 3)}
        ours, theirs = alternate(
            lambda p, b=batches: asyncio.run(serve(engine, b[p].tolist(), NEW)),
            lambda p, b=batches: peer_generate(reference, b[p]),
        )
        speeds[count] = count * NEW / ours
        result(
            f"engine.tokens_per_s.c{count}",
            speeds[count],
            "tokens/s",
            peer="transformers.generate",
            peer_value=count * NEW / theirs,
        )
    asyncio.run(engine.close())
    return speeds


def bound_tokens_per_s() -> float:
    """Sampled tokens per second if all arithmetic ran at the speed of the best matrix product.

    One request computes all 264 − 1 positions through the layers and 64 through the vocabulary.
    """
    model = build(256, 6, 64, 2048)
    head = model.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in model.parameters() if p.dim() == 2) - head
    heads = 4 * 64
    attention = 6 * 4 * heads * sum(range(1, PROMPT + NEW))
    operations = 2 * body * (PROMPT + NEW - 1) + 2 * head * NEW + attention
    return NEW * _best_flops() / operations


def _best_flops() -> float:
    """Floating-point operations per second of a large float32 product, the better of two ways."""
    rows, weight = torch.randn(1024, 256), torch.randn(2048, 256)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def plain() -> None:
        for _ in range(20):
            torch.nn.functional.linear(rows, weight)

    def prepacked() -> None:
        for _ in range(20):
            torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")

    best = min(seconds(action) for action in (plain, prepacked) for _ in range(5))
    return 20 * 2 * 1024 * 256 * 2048 / best


def measure_groups() -> None:
    """The rollouts of a GRPO step: eight to a prompt of 96 tokens, 25 sampled tokens each."""
    model = build(128, 4, 32, 600)
    engine = LocalEngine(model, name="bench", max_context=1024)
    for count in (64, 192):
        taken = []
        for repeat in range(4):
            distinct = prompts(count // 8, 96, 600, 7000 + 10 * count + repeat).tolist()
            rows = [ids for ids in distinct for _ in range(8)]
            taken.append(seconds(lambda r=rows: asyncio.run(serve(engine, r, 25))))
        median = sorted(taken[1:])[1]
        result(f"engine.group_tokens_per_s.c{count}", count * 25 / median, "tokens/s")
    asyncio.run(engine.close())


def main() -> None:
    with torch.no_grad():
        speeds = compare_with_transformers()
        result("engine.share_of_limit.c32", speeds[32] / bound_tokens_per_s(), "of FLOP bound")
        measure_groups()


if __name__ == "__main__":
    main()
