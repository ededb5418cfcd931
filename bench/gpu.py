"""What of a GPU the learner and the engine use: `make bench-gpu`, or `python bench/gpu.py`.

Models of the shapes of Qwen3-0.6B and Qwen3-1.7B with random weights, which need no download, in
bfloat16. The learner takes steps on trees of about 8,000 positions: a group of eight rollouts of
five turns, with one prompt. Its model-FLOP utilisation is the arithmetic that the distinct
positions need, as `flops` counts it, over what the card could have done in that time by its data
sheet; what is computed twice (activation checkpointing) counts once. The engine samples 256 tokens
each for many prompts of 512.

    python bench/gpu.py [--shapes 0.6b 1.7b] [--steps 5] [--peak TFLOPS]
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import transformers
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from engine import prompts, serve
from fulmen.engine.pytorch.attention import prepare
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.learner.activations import checkpoint_layers
from fulmen.learner.learner import Learner
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import OptimiserConfig
from fulmen.learner.trees import Forest, plant
from results import result
from synthetic import group

PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""Dense bfloat16 operations per second by data sheet; the first name that fits counts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3."""

    hidden: int
    inner: int
    layers: int
    heads: int
    shared: int
    """Key and value heads."""
    width: int
    """Of a head."""
    vocabulary: int = 151_936

    def build(self, device: str) -> PreTrainedModel:
        """Random weights, tied embeddings, bfloat16."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.shared,
            head_dim=self.width,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        with torch.device(device):
            return Qwen3ForCausalLM(config).bfloat16().eval()


SHAPES = {
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128),
    "1.7b": Shape(2048, 6144, 28, 16, 8, 128),
    "tiny": Shape(64, 128, 2, 4, 2, 16, vocabulary=512),
}
"""`tiny` is for trying the script without a GPU."""


def flops(shape: Shape, forests: Sequence[Forest]) -> float:
    """Operations of a forward and a backward pass that the distinct positions need.

    A multiplication with its addition is two; a backward pass is twice a forward one. A position
    goes through the matrices of all layers, attends to as many positions as its depth says and to
    itself, and through the vocabulary once if it predicts a sampled token.

    >>> from fulmen.learner.trees import Segment
    >>> import numpy as np
    >>> two = Forest(np.array([1, 2]), np.array([0, 1]), (Segment(0, 2, -1),), ())
    >>> one_layer = Shape(hidden=4, inner=8, layers=1, heads=2, shared=1, width=2, vocabulary=10)
    >>> flops(one_layer, [two])  # 6 · (48 + 96) · 2 + 12 · 4 · 3
    1872.0
    """
    queries = shape.heads * shape.width
    attention = shape.hidden * (2 * queries + 2 * shape.shared * shape.width)
    matrices = shape.layers * (attention + 3 * shape.hidden * shape.inner)
    total = 0.0
    for forest in forests:
        predicting = {int(place) for lesson in forest.lessons for place in lesson.before}
        total += 6.0 * matrices * len(forest.ids)
        total += 12.0 * shape.layers * queries * float((forest.depths + 1).sum())
        total += 6.0 * shape.hidden * shape.vocabulary * len(predicting)
    return total


def peak_of(card: str) -> float:
    """Raises SystemExit for a card whose data sheet is not known here."""
    for name, peak in PEAKS.items():
        if name in card:
            return peak
    raise SystemExit(f"{card}: not among {', '.join(PEAKS)}; give --peak TFLOPS (dense bfloat16)")


def measure_learner(name: str, device: str, *, steps: int, peak: float, checkpoint: bool) -> None:
    """Model-FLOP utilisation of whole steps, the optimiser's part included."""
    shape = SHAPES[name]
    prompt, sampled, observed = (64, 8, 4) if name == "tiny" else (1024, 128, 50)
    items = group(shape.vocabulary, turns=5, prompt=prompt, sampled=sampled, observed=observed)
    model = shape.build(device)
    prepare(model)
    if checkpoint:
        checkpoint_layers(model)
    learner = Learner(
        model,
        objective=Objective(micro_batch_tokens=16_384),
        optimiser=OptimiserConfig(1e-6),
        updating=lambda _: nullcontext(),
    )
    if learner.why:
        raise SystemExit(learner.why)
    learner.layout = "tree"
    taken, positions = [], 0.0
    for step in range(steps + 2):  # the first two compile and find their memory
        started = time.perf_counter()
        positions = learner.learn(items)["learn/computed_tokens"]
        _settled(device)
        if step > 1:
            taken.append(time.perf_counter() - started)
    seconds, needed = statistics.median(taken), flops(shape, plant(items, 16_384))
    suffix = ".checkpointed" if checkpoint else ""
    result(f"gpu.learner_mfu.{name}{suffix}", 100 * needed / seconds / peak, "%")
    result(f"gpu.learner_tokens_per_s.{name}{suffix}", positions / seconds, "positions/s")
    if device.startswith("cuda"):
        gigabytes = torch.cuda.max_memory_allocated() / 2**30
        result(f"gpu.learner_peak_memory.{name}{suffix}", gigabytes, "GiB")
        torch.cuda.reset_peak_memory_stats()


def measure_engine(name: str, device: str, counts: Sequence[int], *, prompt: int, new: int) -> None:
    """Sampled tokens per second at several numbers of requests at once."""
    shape = SHAPES[name]
    engine = LocalEngine(shape.build(device), name=name, max_context=8192, max_batch=max(counts))
    for count in counts:
        taken = []
        for turn in range(4):
            rows = prompts(count, prompt, shape.vocabulary, seed=turn).tolist()
            started = time.perf_counter()
            sampled = asyncio.run(serve(engine, rows, new))
            if turn:
                taken.append(sampled / (time.perf_counter() - started))
        result(f"gpu.engine_tokens_per_s.{name}.c{count}", statistics.median(taken), "tokens/s")
    asyncio.run(engine.close())


def _settled(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What learner and engine use of a GPU.")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=["0.6b", "1.7b"])
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak", type=float, help="dense bfloat16 TFLOPS, if the card is unknown")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU that PyTorch can use; to try the script: --device cpu --shapes tiny"
        )
    card = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    peak = options.peak * 1e12 if options.peak else peak_of(card)
    print(f"{card}; PyTorch {torch.__version__}, transformers {transformers.__version__}")
    for name in options.shapes:
        small = name == "tiny"
        for checkpoint in (False, True):
            measure_learner(
                name, options.device, steps=options.steps, peak=peak, checkpoint=checkpoint
            )
        counts = (2, 4) if small else (16, 64, 256)
        prompt, new = (16, 4) if small else (512, 256)
        measure_engine(name, options.device, counts, prompt=prompt, new=new)


if __name__ == "__main__":
    main()
