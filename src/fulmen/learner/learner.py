"""The learner: credited transitions in, better weights out.

Four verbs, so that any training back end fits behind them: `forward_backward`, `optim_step`
(which publishes), `save`, `load`. This one trains a Hugging Face model in the process, sharing its
weights with the engine: publishing is a version number and costs no copy.
"""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from fulmen.engine.grammar import GrammarCompiler
from fulmen.learner.batch import Layout, MicroBatch, lay_out
from fulmen.learner.layouts import layout_for
from fulmen.learner.logprobs import TokenScores, score
from fulmen.learner.losses import PolicyLoss, clipped_surrogate, kl_to_reference
from fulmen.learner.metrics import Tally
from fulmen.learner.optimiser import Optimiser, OptimiserConfig
from fulmen.schema.records import Credited

Updating = Callable[[int], AbstractContextManager[None]]
"""`with updating(version):` holds the engine while weights change and publishes the version."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Numbers of the loss."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    updates_per_step: int = 1
    micro_batch_tokens: int = 8192


class Learner:
    """Trains one policy with the clipped surrogate, mean over all sampled tokens of an update."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        loss: LossConfig,
        optimiser: OptimiserConfig,
        updating: Updating,
        reference: PreTrainedModel | None = None,
        grammars: GrammarCompiler | None = None,
        layout: Layout | None = None,
    ) -> None:
        """`reference` is the policy that the KL term holds on to; default: `model` as it is now.

        `grammars` repeats what tokens were sampled under; needed where calls have a grammar.
        `layout` is found out if it is not given; `why` then says why it is not trees.
        """
        self.model = model
        self.version = 0
        self.loss = loss
        self.layout: Layout
        self.layout, self.why = (layout, "") if layout else layout_for(model)
        self._optimiser = Optimiser(model, optimiser)
        self._updating = updating
        self._grammars = grammars
        self._reference: PreTrainedModel | None = None
        if loss.kl_coefficient > 0:
            self._reference = (reference or copy.deepcopy(model)).requires_grad_(False)
        self._device = next(model.parameters()).device

    def learn(self, credited: Sequence[Credited]) -> dict[str, float]:
        """Take one training step; returns its metrics. Without any signal nothing changes.

        Transitions with advantage 0 say nothing to the surrogate; they are computed only when a KL
        term or an entropy bonus is on. The mean is over all sampled tokens, theirs included.
        """
        started = time.perf_counter()
        tally = Tally()
        parts = shares(credited, self.loss.updates_per_step)
        updates = [share for share in parts if any(map(self._teaches, share))]
        for index, share in enumerate(updates):
            weighted = zip(share, _mean_over_tokens(share), strict=True)
            lessons, weights = zip(
                *(pair for pair in weighted if self._teaches(pair[0])), strict=True
            )
            # Only the first update sees weights equal to those that sampled: its log-probability
            # differences are the gap between engine and learner, not learning.
            self.forward_backward(lessons, weights, tally, on_policy=index == 0)
            tally.add_update(*self.optim_step())
        return tally.metrics(
            sampled_tokens=sum(len(item.transition.completion_ids) for item in credited),
            transition_tokens=sum(
                len(c.transition.prompt_ids) + len(c.transition.completion_ids) for c in credited
            ),
            seconds=time.perf_counter() - started,
        )

    def forward_backward(
        self,
        items: Sequence[Credited],
        weights: Sequence[float],
        tally: Tally,
        *,
        on_policy: bool = False,
    ) -> None:
        """Add the gradient of the weighted sum of all tokens' losses to the model.

        Args:
            items: M calls.
            weights: (M,) of each call's tokens.
            tally: what is worth watching is added to it.
            on_policy: the weights are those that sampled, so that differences are no learning.
        """
        for batch in lay_out(
            items,
            weights,
            layout=self.layout,
            max_tokens=self.loss.micro_batch_tokens,
            device=self._device,
        ):
            self._backward(batch, tally, on_policy)

    def _backward(self, batch: MicroBatch, tally: Tally, on_policy: bool) -> None:
        bonus = self.loss.entropy_coefficient
        scores = score(self.model, batch, grammars=self._grammars, entropy_gradient=bonus > 0)
        policy = clipped_surrogate(
            scores.logprobs,
            batch.logprobs,
            batch.advantages,
            low=self.loss.clip_low,
            high=self.loss.clip_high,
        )
        total = (batch.weights * policy.loss).sum()
        if bonus > 0:
            total = total - bonus * (batch.weights * scores.entropy).sum()
        kl = self._kl(scores, batch)
        if kl is not None:
            total = total + self.loss.kl_coefficient * (batch.weights * kl).sum()
        total.backward()
        self._tally(tally, batch, scores, policy, kl, on_policy)

    def _teaches(self, item: Credited) -> bool:
        """Whether something can be learned from a call."""
        every = self._reference is not None or self.loss.entropy_coefficient > 0
        signal = every or item.advantage != 0 or any(item.token_advantages)
        return signal and bool(item.transition.completion_ids)

    def optim_step(self) -> tuple[float, float]:
        """Clip, step and publish; returns gradient norm and learning rate."""
        norm = self._optimiser.clip()
        with self._updating(self.version + 1):
            rate = self._optimiser.step()
            self.version += 1
        return norm, rate

    def save(self, folder: Path) -> None:
        """Write weights (Hugging Face format) and optimiser state into an existing folder."""
        self.model.save_pretrained(folder)
        state = {"optimiser": self._optimiser.state(), "version": self.version}
        torch.save(state, folder / "learner.pt")

    def load(self, folder: Path) -> None:
        """Take optimiser state and version from `folder`; the weights come with the model."""
        state = torch.load(folder / "learner.pt", map_location=self._device, weights_only=True)
        self._optimiser.load(state["optimiser"])
        self.version = state["version"]

    def _kl(self, scores: TokenScores, batch: MicroBatch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            reference = score(self._reference, batch, grammars=self._grammars).logprobs
        return kl_to_reference(scores.logprobs, reference)

    def _tally(
        self,
        tally: Tally,
        batch: MicroBatch,
        scores: TokenScores,
        policy: PolicyLoss,
        kl: torch.Tensor | None,
        on_policy: bool,
    ) -> None:
        tally.add_computed(batch.positions)
        tally.add_tokens(
            loss=policy.loss.detach(),
            entropy=scores.entropy.detach(),
            ratio=policy.ratio,
            clipped=policy.clipped,
            kl=None if kl is None else kl.detach(),
            gap=(scores.logprobs.detach() - batch.logprobs).abs() if on_policy else None,
        )


def _mean_over_tokens(items: Sequence[Credited]) -> list[float]:
    sampled = sum(len(item.transition.completion_ids) for item in items)
    return [1 / sampled] * len(items)


def shares(items: Sequence[Credited], parts: int) -> list[list[Credited]]:
    """Split calls into at most `parts` shares of similar size, each group whole in one of them, or
    where there are fewer groups than parts, each rollout.

    Any numbers fit: nothing is dropped for divisibility; fewer rollouts than parts give fewer
    shares.
    """
    chosen = _together(items, lambda item: item.group)
    if len(chosen) < parts:
        chosen = _together(items, lambda item: item.transition.rollout_id)
    result: list[list[Credited]] = [[] for _ in range(min(parts, len(chosen)))]
    sizes = [0] * len(result)
    for unit in chosen:
        lightest = sizes.index(min(sizes))
        result[lightest] += unit
        sizes[lightest] += sum(len(item.transition.completion_ids) for item in unit)
    return result


def _together(items: Sequence[Credited], name: Callable[[Credited], str]) -> list[list[Credited]]:
    """Items of equal names, in order of first appearance."""
    found: dict[str, list[Credited]] = {}
    for item in items:
        found.setdefault(name(item), []).append(item)
    return list(found.values())
