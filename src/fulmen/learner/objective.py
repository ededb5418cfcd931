"""What an update minimises, as data: which functions, with which numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from fulmen.learner.kl import k3
from fulmen.learner.losses import clipped_surrogate
from fulmen.learner.normalisers import token
from fulmen.learner.terms import Correction, Normaliser, PolicyLossFunction

DAPO_CLIP: PolicyLossFunction = partial(clipped_surrogate, low=0.2, high=0.28)
"""The trust region of DAPO, arXiv 2503.14476."""

KlFunction = Callable[[Tensor, Tensor], Tensor]
"""(N,) log π and log π_ref to the (N,) KL term of each token."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Σ over tokens of weight · (correction · loss + β · KL − η · entropy)."""

    loss: PolicyLossFunction = DAPO_CLIP
    every_call: bool = False
    """The loss may learn from calls with advantage 0, too. Those of `losses.py` cannot: there it is
    a factor, so such calls are not computed."""
    normaliser: Normaliser = token
    correction: Correction | None = None
    """For what lies between π_old and μ; None: nothing is done about it."""
    old: Literal["engine", "learner"] = "engine"
    """Where π_old comes from: the engine's record (π_old = μ), or the learner's own forward pass
    with the weights of before the step, which separates learning from the engine's numerics."""
    kl: KlFunction = k3
    kl_coefficient: float = 0.0
    """β; above 0, a frozen reference is kept."""
    kl_in_reward: bool = False
    """Keep a reference without a term in the loss: what is far from it is taken off rewards."""
    entropy_coefficient: float = 0.0
    """η."""
    updates_per_step: int = 1
    """Optimiser steps of one pass over a training step's rollouts, each on a share of them."""
    epochs: int = 1
    """Passes over a training step's rollouts."""
    micro_batch_tokens: int = 8192
    """Positions of one forward pass, unless a single call has more."""
    max_staleness: int | None = None
    """Calls sampled by a policy more versions old than this are left out, and counted."""
