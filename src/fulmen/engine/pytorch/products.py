"""Products with weights packed for oneDNN: one for several layers that have the same input.

A model's only adapter is added to the packed weight. Several stand beside it as two thin products,
those of all adapters and layers in one: down to R numbers a token for each of K adapters, of which
those of other adapters than the token's are made 0, and up again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fulmen.engine.adapted import is_adapted
from fulmen.engine.adapters import merged_weight


class Product:
    """x ↦ x Wᵀ + b, (N, E) to (N, F), with each token's adapter."""

    def __init__(self, layers: Sequence[Any], adapters: Sequence[str]) -> None:
        """Pack linear layers, PEFT's among them, of a model with these adapters."""
        self._layers, self._adapters = layers, adapters
        self._beside = len(adapters) > 1 and any(map(is_adapted, layers))
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        only = adapters[0] if len(adapters) == 1 else None
        self._weight = _reordered(torch.cat([merged_weight(layer, only) for layer in layers]))
        self._down = self._up = self._weight
        self.refresh()

    def refresh(self) -> None:
        """Take the weights of several adapters as they are at this moment."""
        if self._beside:
            thin = [_thin(self._layers, name) for name in self._adapters]
            self._down = _reordered(torch.cat([down for down, _ in thin]))
            self._up = _reordered(torch.cat([up for _, up in thin], dim=1))

    def __call__(self, x: Tensor, table: Tensor | None) -> Tensor:
        """`table`: (N, K), 1 where a token has an adapter, else 0; None: all have the only one."""
        return self._adapted(_linear(x, self._weight, self._bias), x, table)

    def added_to(self, residual: Tensor, x: Tensor, table: Tensor | None) -> Tensor:
        """The same, added to (N, F)."""
        return self._adapted(_sum(residual, x, self._weight, self._bias), x, table)

    def _adapted(self, found: Tensor, x: Tensor, table: Tensor | None) -> Tensor:
        if not self._beside or table is None:
            return found
        thin = _linear(x, self._down, None).view(*table.shape, -1)  # (N, K, R)
        return _sum(found, (thin * table[:, :, None]).flatten(1), self._up, None)


@torch.no_grad()
def _thin(layers: Sequence[Any], adapter: str) -> tuple[Tensor, Tensor]:
    """(R, E) and (F, R): A of every layer that has one, and their B where the layer's rows are."""
    adapted = [layer for layer in layers if is_adapted(layer)]
    down = torch.cat([layer.lora_A[adapter].weight for layer in adapted])
    up = down.new_zeros(sum(layer.out_features for layer in layers), len(down))
    row = column = 0
    for layer in layers:
        if is_adapted(layer):
            own = layer.lora_B[adapter].weight * layer.scaling[adapter]
            up[row : row + own.shape[0], column : column + own.shape[1]] = own
            column += own.shape[1]
        row += layer.out_features
    return down, up


def _reordered(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _sum(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")
