"""Grammar masks as tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fulmen.engine.grammar import Mask

FORBIDDEN = torch.finfo(torch.float32).min
"""Logit of a token that is not allowed. Not −∞, whose product with probability 0 is no number."""


def forbid(logits: Tensor, masks: Sequence[Mask | None]) -> Tensor:
    """Leave to each row only what its mask allows; None allows everything.

    Args:
        logits: (N, V) float32.
        masks: N of them.

    >>> mask = np.array([0b101], dtype=np.int32)
    >>> forbid(torch.zeros(2, 4), [None, mask]).softmax(-1).tolist()
    [[0.25, 0.25, 0.25, 0.25], [0.5, 0.0, 0.5, 0.0]]
    """
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    bits = np.stack([mask for mask in masks if mask is not None]).view(np.uint8)
    packed = torch.from_numpy(bits).to(logits.device)  # (R, ⌈V/32⌉ · 4)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (packed[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[-1]].bool()
    places = torch.tensor(rows, device=logits.device)
    return logits.index_copy(0, places, logits[places].masked_fill(~allowed, FORBIDDEN))
