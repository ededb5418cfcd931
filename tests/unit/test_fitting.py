"""Settings that go together, and those that do not: what would do nothing is refused, in a line."""

import tomllib
from typing import Any

import pytest

from fulmen.schema.config import make_config
from fulmen.schema.errors import ConfigError
from fulmen.schema.fitting import NEEDS
from fulmen.schema.presets import PRESETS
from fulmen.schema.training import TrainConfig
from fulmen.trainer.folder import open_folder

NEEDED = {"agent": "a.py:f", "tasks": "t.jsonl", "model": "m"}

CHOSEN: dict[str, Any] = {
    "task_kind": "env",
    "discount": 0.5,
    "token_discount": 0.5,
    "turn_weight": 2.0,
    "overlong_buffer": 3,
    "overlong_penalty": 2.0,
    "max_groups_factor": 2.0,
    "clip_low": 0.3,
    "clip_high": 0.4,
    "dual_clip": 3.0,
    "constant_tokens": 512.0,
    "correction_low": 0.6,
    "correction_high": 4.0,
    "gae_lambda": 0.9,
    "critic": "shared",
    "critic_model": "models/critic",
    "critic_learning_rate": 1e-4,
    "value_clip": 0.5,
    "value_coefficient": 0.5,
    "kl_estimator": "k2",
    "lora_alpha": 8,
    "lora_targets": ["q_proj"],
    "agent_error_reward": -1.0,
}
"""A value other than the default of every setting that needs another."""

BESIDE: dict[str, dict[str, Any]] = {
    "task_kind": {"whitening": "task"},
    "discount": {"credit": "turn-group"},
    "token_discount": {"advantage": "gae"},
    "turn_weight": {"credit": "turn-group"},
    "overlong_buffer": {"overlong_tokens": 9},
    "overlong_penalty": {"overlong_tokens": 9},
    "max_groups_factor": {"dynamic_sampling": True},
    "clip_low": {"loss": "cispo"},
    "clip_high": {"loss": "gspo"},
    "dual_clip": {"loss": "clip"},
    "constant_tokens": {"normaliser": "constant"},
    "correction_low": {"correction": "mask", "old_logprobs": "learner"},
    "correction_high": {"correction": "truncate", "old_logprobs": "learner"},
    "gae_lambda": {"advantage": "turn-gae"},
    "critic": {"advantage": "gae"},
    "critic_model": {"advantage": "gae"},
    "critic_learning_rate": {"advantage": "gae", "critic": "shared"},
    "value_clip": {"advantage": "gae"},
    "value_coefficient": {"advantage": "gae", "critic": "shared"},
    "kl_estimator": {"kl_coefficient": 0.1},
    "lora_alpha": {"lora_rank": 4},
    "lora_targets": {"lora_rank": 4},
    "agent_error_reward": {"on_agent_error": "penalise"},
}
"""What makes it count."""

WITHOUT: dict[str, dict[str, Any]] = {
    "clip_low": {"loss": "reinforce"},
    "clip_high": {"loss": "own.py:loss"},
    "dual_clip": {"loss": "gspo"},
    "agent_error_reward": {"on_agent_error": "exclude"},
}
"""What makes it count for nothing, where the defaults do not."""


def config(**settings: Any) -> TrainConfig:
    return make_config(TrainConfig, NEEDED | settings)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted({name for need in NEEDS for name in need.settings}))
def test_a_setting_that_would_be_ignored_is_refused_by_its_name(name):
    chosen = {name: CHOSEN[name]}
    assert f"{name} is ignored unless " in refusal(**chosen, **WITHOUT.get(name, {}))
    assert config(**BESIDE[name] | chosen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dual_clip": 3.0, "loss": "cispo"}, "dual_clip is ignored unless loss is 'clip'"),
        (
            {"discount": 0.5},
            "discount is ignored unless credit is 'discounted' or 'turn-group', or advantage is "
            "'turn-gae'",
        ),
        (
            {"token_discount": 0.5, "advantage": "turn-gae"},
            "token_discount is ignored unless credit is 'token-discounted', or advantage is 'gae'",
        ),
        ({"overlong_buffer": 4}, "overlong_buffer is ignored unless overlong_tokens is set"),
        (
            {"correction": "truncate", "old_logprobs": "learner", "correction_low": 0.5},
            "correction_low is ignored unless correction is 'mask' or 'mask-call'",
        ),
        (
            {"correction": "mask", "old_logprobs": "learner", "correction_low": 6.0},
            "correction 'mask' from 6 to 5 leaves no token",
        ),
        (
            {"kl_in_reward": True, "kl_coefficient": 0.1, "kl_estimator": "k2"},
            "kl_estimator is ignored unless kl_in_reward is False",
        ),
        ({"steps": 8, "warmup_steps": 8}, "warmup_steps is 8 and steps 8: the learning rate"),
        (
            {"dynamic_sampling": True, "advantage": "batch-mean"},
            "dynamic_sampling leaves out groups that score alike, and with advantage 'batch-mean'",
        ),
        ({"algorithm": "dapo", "advantage": "gae"}, "and with advantage 'gae' these teach"),
        ({"algorithm": "dapo", "advantage": "none"}, "and with advantage 'none' these teach"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_reason(settings, message):
    assert message in refusal(**settings)


def test_what_only_an_algorithm_or_a_default_brings_along_is_not_refused():
    assert config(algorithm="grpo", loss="reinforce").clip_high == 0.2
    assert config(algorithm="ppo", advantage="grpo").kl_in_reward
    assert config(steps=2).warmup_steps == 5


@pytest.mark.parametrize(
    "settings",
    [*({"algorithm": name} for name in PRESETS), {"algorithm": "grpo", "loss": "reinforce"}],
    ids=str,
)
def test_the_settings_that_a_run_writes_down_can_be_given_to_the_next_one(settings, tmp_path):
    made = config(**settings)
    folder, _ = open_folder(str(tmp_path / "run"), "run", "fail")
    with folder:
        folder.write_config(made, {})
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert make_config(TrainConfig, written) == made
