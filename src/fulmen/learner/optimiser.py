"""AdamW over float32 master weights, with warm-up, schedule and gradient clipping."""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class OptimiserConfig:
    """Numbers of the optimiser."""

    learning_rate: float
    warmup_steps: int = 0
    """Optimiser steps; the last of them is the first at the full rate."""
    schedule: Literal["constant", "linear"] = "constant"
    total_steps: int = 1
    """Where the linear schedule ends, optimiser steps: the last of them has 5 % of the rate."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    beta2: float = 0.95
    faster: tuple[tuple[str, float], ...] = ()
    """Beginnings of parameters' names, and what the rate of those parameters is multiplied with."""
    offload: bool = False
    """Masters, moments and gradients live in the CPU's memory, and the step is made there."""

    def rate(self, step: int) -> float:
        """Learning rate of the optimiser step `step` (0 is the first).

        >>> config = OptimiserConfig(1.0, warmup_steps=2, schedule="linear", total_steps=10)
        >>> [round(config.rate(step), 3) for step in (0, 1, 5, 9, 50)]
        [0.5, 1.0, 0.525, 0.05, 0.05]
        """
        peak, last = max(self.warmup_steps, 1) - 1, self.total_steps - 1
        if step < peak:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * max(0.05, 1 - 0.95 * (step - peak) / max(1, last - peak))


def worth_a_step(grad_norm: float) -> bool:
    """Whether a gradient of this length says anything: it is neither 0 nor not finite.

    One NaN would make all weights NaN. A gradient of exactly 0 is no lesson: no token had a say,
    because all are unusable, left out by a correction, clipped, or ignored by the loss. Adam would
    still go on in the direction of earlier steps, and weight decay shrink the weights. The norm is
    that of all processes together, so all decide alike.

    >>> [worth_a_step(norm) for norm in (0.5, 0.0, math.inf, math.nan)]
    [True, False, False, False]
    """
    return grad_norm > 0 and math.isfinite(grad_norm)


class Optimiser:
    """Steps parameters in place.

    AdamW works on masters in float32: the parameters themselves where they are float32, else copies
    beside them; with `offload` always copies, in the CPU's memory. A copy takes over its
    parameter's gradient at the end of every backward pass, so that micro-batches are summed in
    float32, and gradients stay in the memory of the parameter for no longer than that.
    """

    def __init__(
        self, trained: nn.Module | Mapping[str, nn.Parameter], config: OptimiserConfig
    ) -> None:
        """`trained`: what of a module has gradients, or parameters by the names that are saved."""
        self.config = config
        self.steps_done = 0
        of_module = isinstance(trained, nn.Module)
        named = dict(trained.named_parameters() if of_module else trained)
        named = {name: p for name, p in named.items() if p.requires_grad}
        self._names = list(named)
        self._live = list(named.values())
        self._masters = [self._master(parameter) for parameter in self._live]
        self._copied = [
            (live, master)
            for live, master in zip(self._live, self._masters, strict=True)
            if live is not master
        ]
        for live, master in self._copied:
            handle = live.register_post_accumulate_grad_hook(partial(_take_gradient, master))
            weakref.finalize(self, handle.remove)
        self._adam = torch.optim.AdamW(
            self._groups(),
            lr=config.learning_rate,
            betas=(0.9, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def clip(self) -> float:
        """Shorten the gradient to `max_grad_norm`; returns its length before."""
        norm = nn.utils.clip_grad_norm_(self._masters, self.config.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self) -> float:
        """Change the weights by the gradients, clear these, and return the learning rate used."""
        rate = self.config.rate(self.steps_done)
        for group in self._adam.param_groups:
            group["lr"] = rate * group["times"]
        self._adam.step()
        for live, master in self._copied:
            live.data.copy_(master.data)
        self.zero_grad()
        self.steps_done += 1
        return rate

    def zero_grad(self) -> None:
        """Forget gradients."""
        for parameter in (*self._live, *self._masters):
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything but `steps_done` that it takes to go on exactly here, to be saved, or to be
        loaded in place: moments by parameter, and the masters that are copies."""
        found: dict[str, Tensor] = {}
        for name, live, master in zip(self._names, self._live, self._masters, strict=True):
            moments = self._adam.state[master]
            if not moments:  # as AdamW makes them at its first step
                moments["step"] = torch.zeros((), device=master.device)
                moments["exp_avg"] = torch.zeros_like(master)
                moments["exp_avg_sq"] = torch.zeros_like(master)
            found |= {f"{kind}.{name}": tensor for kind, tensor in moments.items()}
            if live is not master:
                found[f"weight.{name}"] = master.detach()
        return found

    def _groups(self) -> list[dict[str, Any]]:
        """Masters by what their rate is multiplied with, as AdamW takes them."""
        found: dict[float, list[nn.Parameter]] = {}
        for name, master in zip(self._names, self._masters, strict=True):
            times = (own for begin, own in self.config.faster if name.startswith(begin))
            found.setdefault(next(times, 1.0), []).append(master)
        return [{"params": masters, "times": times} for times, masters in found.items()]

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype == torch.float32 and not self.config.offload:
            return parameter
        home = "cpu" if self.config.offload else parameter.device
        return nn.Parameter(parameter.detach().to(home, torch.float32, copy=True))


def _take_gradient(master: nn.Parameter, live: Tensor) -> None:
    """Add a parameter's gradient to its master's, and clear it."""
    assert live.grad is not None, "the hook runs when a gradient is there"
    gradient = live.grad.to(master.device, torch.float32)
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    live.grad = None
