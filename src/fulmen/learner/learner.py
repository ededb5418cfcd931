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
from fulmen.learner.batch import MicroBatch, pack
from fulmen.learner.kl import k3
from fulmen.learner.logprobs import TokenScores, score
from fulmen.learner.losses import clipped_surrogate
from fulmen.learner.metrics import Tally
from fulmen.learner.optimiser import Optimiser, OptimiserConfig
from fulmen.learner.rows import Row, merge, shares
from fulmen.learner.terms import PolicyLoss, Terms
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
    ) -> None:
        """`reference` is the policy that the KL term holds on to; default: `model` as it is now.

        `grammars` repeats what tokens were sampled under; needed where calls have a grammar.
        """
        self.model = model
        self.version = 0
        self.loss = loss
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
        sampled = sum(len(item.transition.completion_ids) for item in credited)
        every = self._reference is not None or self.loss.entropy_coefficient > 0
        rows = merge(item for item in credited if every or item.advantage != 0)
        tally = Tally()
        updates = shares(rows, self.loss.updates_per_step)
        for index, share in enumerate(updates):
            # Only the first update sees weights equal to those that sampled: its log-probability
            # differences are the gap between engine and learner, not learning.
            self.forward_backward(share, sampled / len(updates), tally, on_policy=index == 0)
            tally.add_update(*self.optim_step())
        seconds = time.perf_counter() - started
        return tally.metrics(
            sampled_tokens=sampled,
            computed_tokens=sum(len(row.ids) for row in rows),
            transition_tokens=sum(
                len(c.transition.prompt_ids) + len(c.transition.completion_ids) for c in credited
            ),
            seconds=seconds,
        )

    def forward_backward(
        self, rows: Sequence[Row], denominator: float, tally: Tally, *, on_policy: bool = False
    ) -> None:
        """Add the gradient of the rows' loss ÷ `denominator` to the model."""
        for batch in pack(rows, self.loss.micro_batch_tokens, self._device):
            bonus = self.loss.entropy_coefficient
            scores = score(self.model, batch, grammars=self._grammars, entropy_gradient=bonus > 0)
            policy = clipped_surrogate(
                _terms(scores.logprobs, batch), low=self.loss.clip_low, high=self.loss.clip_high
            )
            total = policy.loss.sum()
            if bonus > 0:
                total = total - bonus * scores.entropy.sum()
            kl = self._kl(scores, batch)
            if kl is not None:
                total = total + self.loss.kl_coefficient * kl.sum()
            (total / denominator).backward()
            self._tally(tally, batch, scores, policy, kl, on_policy)

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
        return k3(scores.logprobs, reference)

    def _tally(
        self,
        tally: Tally,
        batch: MicroBatch,
        scores: TokenScores,
        policy: PolicyLoss,
        kl: torch.Tensor | None,
        on_policy: bool,
    ) -> None:
        tally.add_tokens(
            loss=policy.loss.detach(),
            entropy=scores.entropy.detach(),
            ratio=policy.ratio,
            clipped=policy.clipped,
            kl=None if kl is None else kl.detach(),
            gap=(scores.logprobs.detach() - batch.logprobs).abs() if on_policy else None,
        )


def _terms(logprobs: torch.Tensor, batch: MicroBatch) -> Terms:
    """What the loss sees, with the engine's log-probabilities as anchor."""
    lengths = torch.tensor([len(ids) for _, ids in batch.completions], device=logprobs.device)
    calls = torch.arange(len(lengths), device=logprobs.device).repeat_interleave(lengths)
    return Terms(logprobs, batch.logprobs, batch.logprobs, batch.advantages, calls)
