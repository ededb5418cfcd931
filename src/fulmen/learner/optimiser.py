"""AdamW over float32 master weights, with warm-up, schedule and gradient clipping."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class OptimiserConfig:
    """Numbers of the optimiser."""

    learning_rate: float
    warmup_steps: int = 0
    schedule: Literal["constant", "linear"] = "constant"
    total_steps: int = 1
    """Where the linear schedule ends, optimiser steps."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    beta2: float = 0.95

    def rate(self, step: int) -> float:
        """Learning rate of the optimiser step `step` (0 is the first).

        >>> config = OptimiserConfig(1.0, warmup_steps=2, schedule="linear", total_steps=10)
        >>> [round(config.rate(step), 3) for step in (0, 1, 5, 9, 50)]
        [0.5, 1.0, 0.525, 0.145, 0.05]
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * max(0.05, 1 - 0.95 * step / max(1, self.total_steps))


class Optimiser:
    """Steps a module's parameters in place, keeping float32 masters where they are coarser."""

    def __init__(self, module: nn.Module, config: OptimiserConfig) -> None:
        self.config = config
        self.steps_done = 0
        self._live = [p for p in module.parameters() if p.requires_grad]
        self._masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self._live
        ]
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=config.learning_rate,
            betas=(0.9, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def clip(self) -> float:
        """Shorten the gradient to `max_grad_norm`; returns its length before."""
        return float(nn.utils.clip_grad_norm_(self._live, self.config.max_grad_norm))

    def step(self) -> float:
        """Change the weights by the gradients, clear these, and return the learning rate used."""
        rate = self.config.rate(self.steps_done)
        for group in self._adam.param_groups:
            group["lr"] = rate
        for live, master in self._coarse():
            master.grad = None if live.grad is None else live.grad.float()
        self._adam.step()
        for live, master in self._coarse():
            live.data.copy_(master.data)
        self.zero_grad()
        self.steps_done += 1
        return rate

    def zero_grad(self) -> None:
        """Forget gradients."""
        for parameter in (*self._live, *self._masters):
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Everything `load` needs to go on exactly here."""
        masters = [master.data for _, master in self._coarse()]
        return {"adam": self._adam.state_dict(), "steps": self.steps_done, "masters": masters}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._adam.load_state_dict(state["adam"])
        self.steps_done = state["steps"]
        for (_, master), saved in zip(self._coarse(), state["masters"], strict=True):
            master.data.copy_(saved)

    def _coarse(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self._live, self._masters, strict=True)
        return [(live, master) for live, master in pairs if live is not master]
