"""The learner: credited transitions in, better weights out.

Four verbs, so that any training back end fits behind them: `forward_backward`, `optim_step`
(which publishes), `save`, `load`. A model in this process shares its weights with the engine, so
publishing is a version number and costs no copy; weights spread over several processes
(`sharded.py`) are brought together for it.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.pytorch.attention import prepare
from fulmen.learner.batch import Layout, MicroBatch, lay_out
from fulmen.learner.calls import CallNumbers, by_call, distinct, in_lists, uncredited
from fulmen.learner.checkpoint import (
    PROGRESS,
    STATE,
    load_tensors,
    save_tensors,
    saved_shapes,
)
from fulmen.learner.critic import Critic, OwnCritic, SharedCritic, foresee
from fulmen.learner.exclusion import select, usable, weighted
from fulmen.learner.kl import k1
from fulmen.learner.logprobs import score
from fulmen.learner.metrics import Tally
from fulmen.learner.objective import Objective
from fulmen.learner.optimiser import Optimiser, OptimiserConfig, worth_a_step
from fulmen.learner.terms import Terms
from fulmen.learner.vocabulary import TokenScores
from fulmen.learner.weights import Forward, Weights, Whole, trainable
from fulmen.schema.codec import from_json, to_json
from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Credited, Record, Transition

Updating = Callable[[int], AbstractContextManager[None]]
"""`with updating(version):` holds the engine while weights change and publishes the version."""


class Progress(Record, frozen=True, kw_only=True):
    """How far a learner has come, as a checkpoint holds it."""

    version: int
    optimiser_steps: int
    critic_steps: int = 0
    """Of a critic with an optimiser of its own."""


class Learner:
    """Trains one policy towards an objective."""

    def __init__(
        self,
        policy: PreTrainedModel | Weights,
        *,
        objective: Objective,
        optimiser: OptimiserConfig,
        updating: Updating,
        reference: PreTrainedModel | Forward | None = None,
        grammars: GrammarCompiler | None = None,
        critic: Critic | None = None,
    ) -> None:
        """`reference` is the policy that the KL term holds on to; default: `policy` as it is now.

        `grammars` repeats what tokens were sampled under; needed where calls have a grammar.
        `critic` learns what `values` says; a shared one sits on `policy`. The layout is found out,
        and `why` says why it is not trees; it may be set to another.
        """
        self.weights: Weights = Whole(policy) if isinstance(policy, PreTrainedModel) else policy
        self.version = 0
        self.objective = objective
        self.layout: Layout
        self.layout, self.why = self.weights.layout()
        self._critic = critic
        self._shared = critic if isinstance(critic, SharedCritic) else None
        if self._shared is not None:
            optimiser = replace(optimiser, faster=(("value_head.", self._shared.faster),))
        self._optimiser = Optimiser(_trained(self.weights, self._shared), optimiser)
        self._updating = updating
        self._grammars = grammars
        self._reference: Forward | None = None
        if objective.kl_coefficient > 0 or objective.kl_in_reward:
            if isinstance(reference, PreTrainedModel):
                if self.layout != "chain":
                    prepare(reference)
                reference = Whole(reference.requires_grad_(False))
            self._reference = reference or self.weights.frozen()

    def learn(self, credited: Sequence[Credited]) -> dict[str, float]:
        """Take one training step; returns its metrics. Without any signal nothing changes.

        Transitions with advantage 0 say nothing to a policy gradient; they are computed only when
        the loss is another, a KL term or an entropy bonus is on, or a critic to learn from them.
        The normaliser counts them, too.
        """
        started = time.perf_counter()
        passes = self.objective.epochs
        tally = Tally(passes)
        fresh = [item for item in credited if not self._stale(item)]
        tally.add_stale(_sampled(credited) - _sampled(fresh))
        parts = shares(fresh, self.objective.updates_per_step)
        if isinstance(self._critic, OwnCritic):
            self._critic.learn(parts * passes, self.objective.normaliser, tally)
        updates = [share for share in parts if any(map(self._teaches, share))] * passes
        later = [item for item in distinct(updates[1:]) if self._teaches(item)]
        old, values = self._old_logprobs(later), self._old_values(later)
        for index, share in enumerate(updates):
            pairs = zip(share, self.objective.normaliser(share), strict=True)
            used = [pair for pair in pairs if self._teaches(pair[0])]
            lessons, weights = zip(*used, strict=True)
            # Only the first update sees weights equal to those that sampled: its log-probability
            # differences are the gap between engine and learner, not learning.
            self.forward_backward(
                lessons, weights, tally, old=old, old_values=values, on_policy=index == 0
            )
            tally.add_update(*self.optim_step())
        self.weights.total(tally)
        return tally.metrics(
            sampled_tokens=_sampled(credited),
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
        old: CallNumbers | None = None,
        old_values: CallNumbers | None = None,
        on_policy: bool = False,
    ) -> None:
        """Add the gradient of the weighted sum of all tokens' losses to the model.

        Args:
            items: M calls.
            weights: (M,) of each call's tokens.
            tally: what is worth watching is added to it.
            old: log π_old of the calls that have one; others have the engine's record, or if
                `on_policy`, where the objective wants the learner's, what is computed here.
            old_values: what a shared critic foresaw of them; of others it is what it foresees here.
            on_policy: the weights are those that sampled, so that differences are no learning.
        """
        for batch in self._lay_out(items, weights):
            own = tally if batch.counts else Tally()
            scores = self.weights.run(
                score,
                batch,
                grammars=self._grammars,
                entropy_gradient=self.objective.entropy_coefficient > 0,
                head=self._shared.head if self._shared else None,
            )
            anchor = self._anchor(batch, scores, old or {}, on_policy)
            terms = Terms(scores.logprobs, anchor, batch.logprobs, batch.advantages, batch.calls)
            own.add_computed(batch.positions)
            if on_policy:
                own.add_gap(terms)
            loss = self._loss(batch, scores, terms, own)
            if self._shared is not None and scores.values is not None:
                loss = loss + self._shared.loss(scores.values, batch, old_values or {}, own)
            loss.backward()

    def _loss(self, batch: MicroBatch, scores: TokenScores, terms: Terms, tally: Tally) -> Tensor:
        """The micro-batch's part of the objective, () with gradient."""
        aim, fit = self.objective, usable(terms)
        tally.add_unusable(int((~fit).sum()))
        sound = select(terms, fit)
        policy = aim.loss(sound)
        tokens = policy.loss
        if aim.correction is not None:
            factor = aim.correction(sound)
            tally.add_correction(factor)
            tokens = weighted(tokens, factor)
        if aim.entropy_coefficient > 0:
            tokens = tokens - aim.entropy_coefficient * scores.entropy[fit]
        kl = None
        if aim.kl_coefficient > 0:
            with torch.no_grad():
                reference = self._logprobs(self._held(), batch)[fit]
            kl = aim.kl(sound.logprobs, reference)
            tokens = tokens + aim.kl_coefficient * kl
        tally.add_tokens(policy, entropy=scores.entropy[fit], kl=kl)
        return (batch.weights[fit] * tokens).sum()

    def _lay_out(self, items: Sequence[Credited], weights: Sequence[float]) -> list[MicroBatch]:
        """This process's micro-batches; of the same calls always the same."""
        batches = lay_out(
            items,
            weights,
            layout=self.layout,
            max_tokens=self.objective.micro_batch_tokens,
            device=self.weights.device,
        )
        return self.weights.share(batches)

    def values(self, transitions: Sequence[Transition]) -> list[list[float]]:
        """What the critic foresees just before each completion token, in the order given; an empty
        list for a call without a completion.

        Raises:
            ConfigError: there is no critic.
        """
        items = uncredited(transitions)
        match self._critic:
            case OwnCritic() as own:
                return in_lists(items, own.values(items))
            case SharedCritic():
                return in_lists(items, self._old_values(items))
            case None:
                raise ConfigError("this learner has no critic", hint="give it one")

    def kl(self, transitions: Sequence[Transition]) -> list[list[float]]:
        """k1 of each completion token against the reference, nats; lists as those of `values`.

        Raises:
            ConfigError: there is no reference.
        """
        reference, items = self._held(), uncredited(transitions)
        found = by_call(
            self._lay_out(items, [0.0] * len(items)),
            lambda batch: k1(self._logprobs(self.weights, batch), self._logprobs(reference, batch)),
        )
        return in_lists(items, self.weights.collect(items, found))

    def _held(self) -> Forward:
        if self._reference is None:
            raise ConfigError("this learner has no reference", hint="set kl_in_reward")
        return self._reference

    def _logprobs(self, policy: Forward, batch: MicroBatch) -> Tensor:
        """(N,) log π of the batch's tokens under a policy."""
        return policy.run(score, batch, grammars=self._grammars).logprobs

    def _old_logprobs(self, later: Sequence[Credited]) -> CallNumbers:
        """log π_old of the calls of all updates but the first, whose own forward pass is soon
        enough; nothing where the engine's record is the anchor."""
        if self.objective.old == "engine":
            return {}
        batches = self._lay_out(later, [0.0] * len(later))
        found = by_call(batches, lambda batch: self._logprobs(self.weights, batch))
        return self.weights.collect(later, found)

    def _old_values(self, later: Sequence[Credited]) -> CallNumbers:
        """What a shared critic foresees as the weights are now; nothing where there is none."""
        if self._shared is None:
            return {}
        head, batches = self._shared.head, self._lay_out(later, [0.0] * len(later))

        def values(batch: MicroBatch) -> Tensor:
            return self.weights.run(lambda model: foresee(model.get_decoder(), batch, head))

        return by_call(batches, values)

    def _anchor(
        self, batch: MicroBatch, scores: TokenScores, old: CallNumbers, on_policy: bool
    ) -> Tensor:
        """(N,) log π_old of a micro-batch."""
        if self.objective.old == "engine":
            return batch.logprobs
        if on_policy:
            return scores.logprobs.detach()
        return torch.cat([old[id(item)] for item in batch.items])

    def _stale(self, item: Credited) -> bool:
        limit = self.objective.max_staleness
        return limit is not None and self.version - item.transition.version > limit

    def _teaches(self, item: Credited) -> bool:
        """Whether something can be learned from a call."""
        aim = self.objective
        every = (
            aim.every_call
            or aim.kl_coefficient > 0
            or aim.entropy_coefficient > 0
            or self._shared is not None
        )
        signal = every or item.advantage != 0 or any(item.token_advantages)
        return signal and bool(item.transition.completion_ids)

    def optim_step(self) -> tuple[float, float | None]:
        """Clip, step and publish; returns gradient norm and learning rate.

        The rate is None, and nothing changes, if the gradient says nothing (`worth_a_step`).
        """
        norm = self._optimiser.clip()
        if not worth_a_step(norm):
            self._optimiser.zero_grad()
            return norm, None
        with self._updating(self.version + 1):
            rate = self._optimiser.step()
            self.weights.publish()
            self.version += 1
        return norm, rate

    def save(self, folder: Path, *, final: bool = True) -> None:
        """Write the policy and the state of training into an existing folder.

        If it is not `final`, of a policy with an adapter only that is written.
        """
        self.weights.save(folder, final=final)
        save_tensors(folder / STATE, self.weights.tensors() | self._optimiser.tensors())
        if not self.weights.first:
            return
        own = self._critic.optimiser.steps_done if isinstance(self._critic, OwnCritic) else 0
        progress = Progress(
            version=self.version, optimiser_steps=self._optimiser.steps_done, critic_steps=own
        )
        if self._critic is not None:
            save_tensors(folder / "critic", self._critic.tensors(), alone=True)
        folder.joinpath(PROGRESS).write_bytes(to_json(progress))

    def load(self, folder: Path) -> None:
        """Take the state of training from `folder`; the policy itself is that of `folder` already.

        Any number of processes may have written it.
        """
        saved = saved_shapes(folder / STATE)
        more = {name: tensor for name, tensor in self.weights.tensors().items() if name in saved}
        load_tensors(folder / STATE, more | self._optimiser.tensors())
        progress = from_json(Progress, folder.joinpath(PROGRESS).read_bytes())
        self.version, self._optimiser.steps_done = progress.version, progress.optimiser_steps
        if self._critic is not None:
            load_tensors(folder / "critic", self._critic.tensors(), alone=True)
        if isinstance(self._critic, OwnCritic):
            self._critic.optimiser.steps_done = progress.critic_steps


def _trained(policy: Weights, critic: SharedCritic | None) -> dict[str, nn.Parameter]:
    """What the policy's optimiser steps."""
    if critic is None:
        return policy.trained()
    own = {f"policy.{name}": parameter for name, parameter in policy.trained().items()}
    return own | {f"value_head.{name}": p for name, p in trainable(critic.head).items()}


def _sampled(items: Sequence[Credited]) -> int:
    """How many tokens they have sampled."""
    return sum(len(item.transition.completion_ids) for item in items)


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
