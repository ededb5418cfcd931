"""The critic of PPO: a value head says, before each sampled token, what is to be expected.

The head sits on a model of its own, with an optimiser of its own (`OwnCritic`), or on the policy's
hidden states (`SharedCritic`): then its loss is added to the policy's, and both train the backbone.
Either way the value of a token is read where the model has seen everything before it.

For the critic a call weighs what it weighs for the policy: the normaliser's weights, and the same
shares for the same optimiser steps. With `token` that is the mean over tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fulmen.learner.batch import Layout, MicroBatch, lay_out
from fulmen.learner.calls import CallNumbers, by_call, distinct, lengths
from fulmen.learner.layouts import layout_for
from fulmen.learner.logprobs import hidden_before
from fulmen.learner.losses import value_loss
from fulmen.learner.metrics import Tally
from fulmen.learner.optimiser import Optimiser, OptimiserConfig, worth_a_step
from fulmen.learner.terms import Normaliser
from fulmen.schema.errors import DataError
from fulmen.schema.records import Credited


class ValueHead(nn.Module):
    """One number for each hidden state: a linear layer in float32, 0 at first."""

    def __init__(self, model: PreTrainedModel) -> None:
        """For the hidden states of `model`, on its device."""
        super().__init__()
        width = model.config.get_text_config().hidden_size
        device = next(model.parameters()).device
        self.linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, H) of any dtype to (N,) float32."""
        return self.linear(hidden.float()).squeeze(-1)


def foresee(decoder: nn.Module, batch: MicroBatch, head: ValueHead) -> Tensor:
    """(N,) what is expected just before each of the N sampled tokens."""
    return head(hidden_before(decoder, batch))


class SharedCritic:
    """A value head on the policy's own hidden states; the policy's optimiser steps it."""

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        coefficient: float = 0.1,
        clip: float | None = 0.2,
        faster: float = 10.0,
    ) -> None:
        """`coefficient`: of the value loss beside the policy's; `clip`: see `value_loss`; `faster`:
        what the policy's learning rate is multiplied with for the head."""
        self.head = ValueHead(policy)
        self.faster = faster
        self._coefficient, self._clip = coefficient, clip

    def loss(self, values: Tensor, batch: MicroBatch, before: CallNumbers, tally: Tally) -> Tensor:
        """What is added to the policy's loss, (): c·Σ weight·value loss of (N,) values."""
        return self._coefficient * _loss(values, batch, before, self._clip, tally)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it: to be saved, or to be loaded in place."""
        return _weights(self.head)


class OwnCritic:
    """A value head on a model of its own, which nothing but the value loss trains."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        optimiser: OptimiserConfig,
        clip: float | None = 0.2,
        max_tokens: int = 8192,
    ) -> None:
        """Put a head on a model, which then belongs to the critic.

        Args:
            model: reads the policy's tokens; what it predicts is not used.
            optimiser: of model and head.
            clip: see `value_loss`.
            max_tokens: positions of one forward pass, unless a single call has more.
        """
        self.layout: Layout = layout_for(model)[0]
        self._device = next(model.parameters()).device
        self._max_tokens, self._clip = max_tokens, clip
        self.decoder: Any = model.get_decoder()
        self.head = ValueHead(model)
        self._trained = nn.ModuleDict({"decoder": self.decoder, "head": self.head})
        self.optimiser = Optimiser(self._trained, optimiser)

    def values(self, items: Sequence[Credited]) -> CallNumbers:
        """What it foresees just before each completion token, without gradient."""
        batches = self._lay_out(items, [0.0] * len(items))
        return by_call(batches, lambda batch: foresee(self.decoder, batch, self.head))

    def learn(
        self, shares: Sequence[Sequence[Credited]], normaliser: Normaliser, tally: Tally
    ) -> None:
        """Take one optimiser step on each share's returns, if they say anything.

        A share may come again: values are held near those from before all steps.
        """
        before = self.values(distinct(shares[1:]))
        for share in shares:
            batches = self._lay_out(share, normaliser(share))
            for batch in batches:
                values = foresee(self.decoder, batch, self.head)
                _loss(values, batch, before, self._clip, tally).backward()
            norm = self.optimiser.clip()
            if worth_a_step(norm):
                tally.add_critic_update(norm)
                self.optimiser.step()
            else:
                self.optimiser.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it: to be saved, or to be loaded in place."""
        return _weights(self._trained) | self.optimiser.tensors()

    def _lay_out(self, items: Sequence[Credited], weights: Sequence[float]) -> list[MicroBatch]:
        return lay_out(
            items,
            weights,
            layout=self.layout,
            max_tokens=self._max_tokens,
            device=self._device,
        )


Critic = OwnCritic | SharedCritic


def _loss(
    values: Tensor, batch: MicroBatch, before: CallNumbers, clip: float | None, tally: Tally
) -> Tensor:
    """Σ weight·value loss, () with gradient.

    Args:
        values: (N,) of the batch's tokens, with gradient.
        batch: N tokens of calls that have returns.
        before: values when the step began; calls that are not there have them now.
        clip: see `value_loss`.
        tally: what is worth watching is added to it.
    """
    now = values.detach().split(lengths(batch))
    pairs = zip(batch.items, now, strict=True)
    old = torch.cat([before.get(id(item), own) for item, own in pairs])
    returns = _returns(batch)
    found = value_loss(values, old, returns, clip=clip)
    tally.add_values(found, old, returns)
    return (batch.weights * found.loss).sum()


def _returns(batch: MicroBatch) -> Tensor:
    """(N,) float32.

    Raises:
        DataError: a call was credited without a critic.
    """
    for item, count in zip(batch.items, lengths(batch), strict=True):
        if len(item.returns) != count:
            call, have = item.transition.call_id, len(item.returns)
            raise DataError(f"call {call} has {count} tokens and {have} returns for the critic")
    returns = [value for item in batch.items for value in item.returns]
    return torch.tensor(returns, dtype=torch.float32, device=batch.weights.device)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    # "weight." is the prefix of the optimiser's masters, where these are copies.
    return {f"live.{name}": parameter.detach() for name, parameter in module.named_parameters()}
