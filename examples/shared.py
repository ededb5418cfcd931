"""What the recipes of the mini experiments have in common."""

from collections.abc import Mapping
from types import MappingProxyType

SETTINGS: Mapping[str, object] = MappingProxyType(
    {
        "workers": 64,
        "tasks-per-step": 16,
        "group-size": 8,
        "learning-rate": 1e-3,
        "schedule": "linear",
        "entropy-coefficient": 0.005,
    }
)
"""Of `fulmen train`: steps of 16 × 8 rollouts."""
