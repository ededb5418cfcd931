"""Sums over micro-batches that become the numbers of a training step."""

import math

import torch
from torch import Tensor

from fulmen.learner.corrections import effective_share
from fulmen.learner.losses import ValueLoss
from fulmen.learner.ratios import MAX_LOG_RATIO
from fulmen.learner.terms import PolicyLoss, Terms
from fulmen.schema.codec import pack_floats, unpack_floats
from fulmen.schema.records import Record


class Counted(Record, frozen=True, kw_only=True):
    """What a tally has counted of tokens, to be added to that of another process."""

    sums: dict[str, float]
    counts: dict[str, int]
    maxima: dict[str, float]
    computed: int
    unusable: int
    corrections: bytes
    """Factors as float32."""


_MOMENTS = ("return", "return_square", "surprise", "surprise_square")
"""Sums that are no metrics themselves."""
_NO_VARIANCE = 1e-12
"""Of the mean square: below it a variance is rounding."""


class Tally:
    """Collects per-token numbers; means are over tokens, not over micro-batches."""

    def __init__(self, passes: int = 1) -> None:
        """Every token comes by so many times."""
        self._passes = passes
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, float] = {}
        self._grad_norms: list[float] = []
        self._rate = 0.0
        self._computed = 0
        self._unusable = 0
        self._stale = 0
        self._skipped = 0
        self._empty = 0
        self._weights: list[Tensor] = []

    def add_tokens(self, policy: PolicyLoss, *, entropy: Tensor, kl: Tensor | None) -> None:
        """Add what the tokens of one micro-batch gave, (N,) each."""
        ratio = policy.ratio
        self._add("loss", policy.loss.detach())
        self._add("entropy", entropy.detach())
        self._add("ratio", ratio)
        self._add("clip_fraction", policy.clipped.float())
        # k3 estimate of KL(π_old ‖ π) from samples: how far the policy moved within the step.
        self._add("kl_step", ratio - 1 - ratio.log())
        self._most("ratio_max", ratio)
        if kl is not None:
            self._add("kl_reference", kl.detach())

    def add_gap(self, terms: Terms) -> None:
        """Add how far engine and learner are apart on the same weights: |Δ log-prob| of the sampled
        tokens, and the k3 estimate of KL(μ ‖ π). Tokens without a log-probability are left out."""
        delta = (terms.logprobs.detach() - terms.behaviour).double()
        delta = delta[delta.isfinite()]
        self._add("gap_mean", delta.abs())
        self._most("gap_max", delta.abs())
        self._add("gap_kl", torch.expm1(delta.clamp(max=MAX_LOG_RATIO)) - delta)

    def add_correction(self, weights: Tensor) -> None:
        """Add the factors of a correction, (N,)."""
        self._add("correction", weights)
        self._add("corrected_away", (weights == 0).float())
        self._weights.append(weights.detach().cpu())

    def add_values(self, critic: ValueLoss, before: Tensor, returns: Tensor) -> None:
        """Add what the critic makes of the tokens of one micro-batch, (N,) each; `before` is what
        it foresaw when the step began, from which the advantages were made."""
        self._add("value_loss", critic.loss.detach())
        self._add("value_clip_fraction", critic.clipped.float())
        surprise = returns.double() - before.double()
        for name, values in (("return", returns.double()), ("surprise", surprise)):
            self._add(name, values)
            self._add(f"{name}_square", values.square())

    def add_critic_update(self, grad_norm: float) -> None:
        """Add one optimiser step of a critic that has its own."""
        self._add("critic_grad_norm", torch.tensor([grad_norm]))

    def add_stale(self, tokens: int) -> None:
        """Count tokens of calls that a policy too old has sampled."""
        self._stale += tokens

    def add_unusable(self, tokens: int) -> None:
        """Count tokens that excluded themselves: of calls without a log-probability."""
        self._unusable += tokens

    def add_computed(self, positions: int) -> None:
        """Count what one forward pass computed, padding included."""
        self._computed += positions

    def add_update(self, grad_norm: float, learning_rate: float | None) -> None:
        """Add one optimiser step; without a rate it was not made: the gradient was 0, or was not
        finite."""
        if learning_rate is not None:
            self._grad_norms.append(grad_norm)
            self._rate = learning_rate
        elif grad_norm == 0:
            self._empty += 1
        else:
            self._skipped += 1

    def counted(self) -> Counted:
        """What this process has counted, without optimiser steps, which all take together."""
        factors = torch.cat(self._weights).tolist() if self._weights else []
        return Counted(
            sums=self._sums,
            counts=self._counts,
            maxima=self._maxima,
            computed=self._computed,
            unusable=self._unusable,
            corrections=pack_floats(factors),
        )

    def add(self, other: Counted) -> None:
        """Add what another process has counted."""
        for name, value in other.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + other.counts[name]
        for name, value in other.maxima.items():
            self._maxima[name] = max(self._maxima.get(name, 0.0), value)
        self._computed += other.computed
        self._unusable += other.unusable
        if other.corrections:
            self._weights.append(torch.tensor(unpack_floats(other.corrections)))

    def metrics(
        self, *, sampled_tokens: int, transition_tokens: int, seconds: float
    ) -> dict[str, float]:
        """Everything as numbers; what was not measured (no signal, no KL) is absent, never 0."""
        means = {n: s / self._counts[n] for n, s in self._sums.items() if self._counts[n]}
        result = {f"learn/{n}": mean for n, mean in means.items() if n not in _MOMENTS}
        result |= _explained_variance(means)
        result |= {f"learn/{name}": value for name, value in self._maxima.items()}
        if self._weights:
            result["learn/effective_share"] = effective_share(torch.cat(self._weights))
        if self._grad_norms:
            result["learn/grad_norm"] = math.fsum(self._grad_norms) / len(self._grad_norms)
            result["learn/learning_rate"] = self._rate
        result |= {
            "learn/stale_tokens": float(self._stale),
            "learn/unusable_tokens": self._unusable / self._passes,
            "learn/skipped_updates": float(self._skipped),
            "learn/empty_updates": float(self._empty),
            "learn/updates": float(len(self._grad_norms)),
            "learn/sampled_tokens": float(sampled_tokens),
            "learn/computed_tokens": float(self._computed),
            "learn/transition_tokens": float(transition_tokens),
            "learn/seconds": seconds,
            "learn/tokens_per_s": self._computed / seconds if seconds > 0 else 0.0,
        }
        return result

    def _most(self, name: str, values: Tensor) -> None:
        if len(values):
            self._maxima[name] = max(self._maxima.get(name, 0.0), float(values.max()))

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.double().sum())
        self._counts[name] = self._counts.get(name, 0) + values.numel()


def _explained_variance(means: dict[str, float]) -> dict[str, float]:
    """1 − var(returns − values) / var(returns): 1 is a critic that knew, 0 one that says the same
    of everything. Of returns that are all equal there is nothing to explain."""
    if not means.keys() >= set(_MOMENTS):
        return {}
    total = means["return_square"] - means["return"] ** 2
    left = means["surprise_square"] - means["surprise"] ** 2
    if total <= _NO_VARIANCE * means["return_square"]:
        return {}
    return {"learn/explained_variance": 1 - left / total}
