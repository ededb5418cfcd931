"""Sums over micro-batches that become the numbers of a training step."""

import math

from torch import Tensor


class Tally:
    """Collects per-token numbers; means are over tokens, not over micro-batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, float] = {}
        self._grad_norms: list[float] = []
        self._rate = 0.0
        self._computed = 0

    def add_tokens(
        self,
        *,
        loss: Tensor,
        entropy: Tensor,
        ratio: Tensor,
        clipped: Tensor,
        kl: Tensor | None,
        gap: Tensor | None,
    ) -> None:
        """Add the tokens of one micro-batch, each argument (N,) without gradient."""
        self._add("loss", loss)
        self._add("entropy", entropy)
        self._add("ratio", ratio)
        self._add("clip_fraction", clipped.float())
        # k3 estimate of KL(μ ‖ π) from samples of μ: how far the policy moved within the step.
        self._add("kl_step", ratio - 1 - ratio.log())
        self._maxima["ratio_max"] = max(self._maxima.get("ratio_max", 0.0), float(ratio.max()))
        if kl is not None:
            self._add("kl_reference", kl)
        if gap is not None:
            self._add("gap_mean", gap)
            self._maxima["gap_max"] = max(self._maxima.get("gap_max", 0.0), float(gap.max()))

    def add_computed(self, positions: int) -> None:
        """Count what one forward pass computed, padding included."""
        self._computed += positions

    def add_update(self, grad_norm: float, learning_rate: float) -> None:
        """Add one optimiser step."""
        self._grad_norms.append(grad_norm)
        self._rate = learning_rate

    def metrics(
        self, *, sampled_tokens: int, transition_tokens: int, seconds: float
    ) -> dict[str, float]:
        """Everything as numbers; what was not measured (no signal, no KL) is absent, never 0."""
        result = {f"learn/{n}": s / self._counts[n] for n, s in self._sums.items()}
        result |= {f"learn/{name}": value for name, value in self._maxima.items()}
        if self._grad_norms:
            result["learn/grad_norm"] = math.fsum(self._grad_norms) / len(self._grad_norms)
            result["learn/learning_rate"] = self._rate
        result |= {
            "learn/updates": float(len(self._grad_norms)),
            "learn/sampled_tokens": float(sampled_tokens),
            "learn/computed_tokens": float(self._computed),
            "learn/transition_tokens": float(transition_tokens),
            "learn/seconds": seconds,
            "learn/tokens_per_s": self._computed / seconds if seconds > 0 else 0.0,
        }
        return result

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.double().sum())
        self._counts[name] = self._counts.get(name, 0) + values.numel()
