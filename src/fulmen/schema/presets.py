"""Algorithms by name: each is a choice of settings, and nothing else.

What a user sets beside it wins. Whatever is not here is no part of the algorithm (group size,
learning rate, length) and keeps its default.
"""

from collections.abc import Mapping
from types import MappingProxyType

Setting = str | float | bool

PRESETS: Mapping[str, Mapping[str, Setting]] = MappingProxyType(
    {
        # arXiv 2402.03300: the deviation of the group, the mean of each rollout, k3 in the loss.
        "grpo": {
            "advantage": "grpo",
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "normaliser": "rollout",
            "kl_coefficient": 0.04,
            "kl_estimator": "k3",
        },
        # arXiv 2503.20783: no deviation, no length, no KL.
        "dr-grpo": {
            "advantage": "group-mean",
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "normaliser": "constant",
        },
        # arXiv 2503.14476; its over-long punishment needs a length: `overlong_tokens`.
        "dapo": {
            "advantage": "grpo",
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "normaliser": "token",
            "dynamic_sampling": True,
        },
        # arXiv 2402.14740: whole answers as actions, so their log-probabilities are summed; k1 in
        # the reward. Its weight is tuned there; 0.05 is the default of TRL's RLOO.
        "rloo": {
            "advantage": "rloo",
            "loss": "reinforce",
            "normaliser": "constant",
            "kl_in_reward": True,
            "kl_coefficient": 0.05,
        },
        # arXiv 2501.03262: no groups; k1 in the reward of each token, whitening over the batch.
        "reinforce++": {
            "advantage": "none",
            "credit": "reward-to-go",
            "whitening": "batch",
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "normaliser": "token",
            "kl_in_reward": True,
            "kl_coefficient": 0.01,
        },
        # The same with groups, and k2 in the loss.
        "reinforce++-baseline": {
            "advantage": "group-mean",
            "whitening": "batch",
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "normaliser": "token",
            "kl_coefficient": 0.01,
            "kl_estimator": "k2",
        },
        # arXiv 1707.06347 with arXiv 1506.02438, as used for language models (arXiv 1909.08593).
        "ppo": {
            "advantage": "gae",
            "whitening": "batch",
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "normaliser": "token",
            "kl_in_reward": True,
            "kl_coefficient": 0.01,
        },
        # The same with a call as the action.
        "turn-ppo": {
            "advantage": "turn-gae",
            "discount": 1.0,
            "whitening": "batch",
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "normaliser": "token",
        },
        # arXiv 2507.18071: one ratio for a call.
        "gspo": {
            "advantage": "grpo",
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            # The numerics of another engine alone would fill so narrow a region in bfloat16.
            "old_logprobs": "learner",
            "normaliser": "transition",
        },
        # arXiv 2506.13585: weights are clipped, gradients never vanish; no lower bound.
        "cispo": {
            "advantage": "grpo",
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 0.28,
            "normaliser": "token",
        },
        # arXiv 2505.10978: turns in the same state are compared, too; the mean over turns, k3 in
        # the loss with the weight of its code.
        "gigpo": {
            "advantage": "grpo",
            "credit": "turn-group",
            "discount": 0.95,
            "turn_weight": 1.0,
            "loss": "clip",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "normaliser": "transition",
            "kl_coefficient": 0.01,
            "kl_estimator": "k3",
        },
        # Williams 1992, with the mean of the step as baseline.
        "reinforce": {"advantage": "batch-mean", "loss": "reinforce", "normaliser": "token"},
        # Rejection-sampling fine-tuning, arXiv 2308.01825: supervised on what has a reward above 0.
        "rejection": {"advantage": "none", "loss": "supervised", "normaliser": "token"},
    }
)


def with_preset(values: Mapping[str, object]) -> dict[str, object]:
    """Settings with those that `algorithm` stands for, where they are not set themselves.

    Raises:
        ValueError: there is no such algorithm.

    >>> with_preset({"algorithm": "rejection", "normaliser": "rollout"})
    {'advantage': 'none', 'loss': 'supervised', 'normaliser': 'rollout', 'algorithm': 'rejection'}
    """
    name = values.get("algorithm")
    if name is None:
        return dict(values)
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"there is no algorithm {name!r}; known: {', '.join(PRESETS)}")
    return {**PRESETS[name], **values}
