"""Settings of `fulmen train`."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fulmen.schema.config import Common, RunSettings, Settings, nearest, words
from fulmen.schema.fitting import (
    CORRECTION_BOUNDS,
    CRITIC_ADVANTAGES,
    GROUP_ADVANTAGES,
    misfits,
)
from fulmen.schema.presets import with_preset

ADVANTAGES = (*GROUP_ADVANTAGES, "batch-mean", "none", *CRITIC_ADVANTAGES)
LOSSES = ("clip", "gspo", "cispo", "reinforce", "supervised")
NORMALISERS = ("token", "transition", "rollout", "group", "constant")
CORRECTIONS = ("none", *CORRECTION_BOUNDS)


def _named(*names: str) -> AfterValidator:
    """One of the names, or a user's function."""

    def check(value: str) -> str:
        if value not in names and not re.search(r"\w:\w+$", value):
            raise ValueError(f"{nearest(value, names)}; or file.py:function")
        return value

    return AfterValidator(check)


class CreditSettings(Settings):
    """How rewards become advantages."""

    advantage: Annotated[str, _named(*ADVANTAGES)] = "grpo"
    """What is taken off a rollout's reward: `grpo` (mean and deviation of its group), `group-mean`
    (Dr. GRPO), `rloo`, `maxrl`, `batch-mean` or `none` (REINFORCE), a critic with `gae` or
    `turn-gae` (PPO), or `file.py:function` of rewards and groups; see docs/credit.md."""
    whitening: Literal["none", "batch", "task"] = "none"
    """Shift and scale advantages to mean 0 and deviation 1: over all tokens of the step
    (REINFORCE++), or over those of each kind of task (AgentRL)."""
    task_kind: str | None = None
    """Key of a task's metadata that names its kind, for `whitening = "task"`."""
    credit: Literal[
        "identical",
        "last",
        "discounted",
        "reward-to-go",
        "per-agent",
        "turn-group",
        "token-discounted",
    ] = "identical"
    """How rewards become advantages of single calls, or tokens; see docs/credit.md."""
    discount: float = Field(default=0.95, gt=0, le=1)
    """γ of `discounted`, `turn-group`, `turn-gae`: what is a call later counts this much less."""
    token_discount: float = Field(default=1.0, gt=0, le=1)
    """γ of `token-discounted` and `gae`: what is a token later counts this much less."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ of `gae` and `turn-gae`: 0 trusts the critic, 1 what happened."""
    turn_weight: float = Field(default=1.0, ge=0)
    """ω of `turn-group`: weight of the comparison between turns in the same state."""
    air: str | None = None
    """TOML file of rules that reward what happens on the way: tools that failed, say."""
    train: str | None = None
    """Agents to train, of several: names or patterns with commas, or `file.py:function` of a
    call; default: all. The others are sampled from the same policy."""
    overlong_tokens: int | None = Field(default=None, ge=1)
    """A rollout that samples more tokens than this, all its calls together, is punished (DAPO)."""
    overlong_buffer: int = Field(default=0, ge=0)
    """So many tokens before `overlong_tokens` the punishment begins to grow from 0."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """What is taken off the reward at `overlong_tokens` and above."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by other tasks, until a step is full (DAPO)."""
    max_groups_factor: float = Field(default=3.0, ge=1)
    """With `dynamic_sampling`, a step asks for this many times tasks-per-step groups at most."""


class LossSettings(Settings):
    """What an update minimises."""

    loss: Annotated[str, _named(*LOSSES)] = "clip"
    """Loss of a token: `clip` (PPO, GRPO, DAPO), `gspo`, `cispo`, `reinforce`, `supervised`, or
    `file.py:function` of the sampled tokens; see docs/algorithms.md."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The probability ratio may fall to 1 − this before the gradient stops; 1 is no bound."""
    clip_high: float = Field(default=0.28, gt=0)
    """The probability ratio may rise to 1 + this before the gradient stops."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With loss `clip`: tokens with a negative advantage count at most this many times it."""
    normaliser: Annotated[str, _named(*NORMALISERS)] = "token"
    """What the loss is a mean over: every `token`, `transition`, `rollout` or `group` alike, or
    `constant`: rollouts × constant_tokens; or `file.py:function` of credited calls."""
    constant_tokens: float = Field(default=1024, gt=0)
    """With normaliser `constant`: the unit that a rollout's sum is divided by."""
    old_logprobs: Literal["engine", "learner"] = "engine"
    """The policy that the trust region is around: as the engine recorded it, or as the learner
    computes it, which leaves the gap between the two to a `correction`."""
    correction: Annotated[str, _named(*CORRECTIONS)] = "none"
    """Weight for what lies between engine and learner: `truncate` or `mask` tokens, or calls, or
    `file.py:function` of the sampled tokens; needs `old_logprobs = "learner"`."""
    correction_low: float | None = Field(default=None, ge=0)
    """Lower bound of a `mask`; default: the usual one."""
    correction_high: float | None = Field(default=None, gt=0)
    """Upper bound of a correction; default: the usual one."""
    critic: Literal["own", "shared"] = "own"
    """With `gae` or `turn-gae`: a critic on a model of its `own`, or a head on the policy's hidden
    states (`shared`), which costs next to nothing and trains the policy's weights, too."""
    critic_model: str | None = None
    """What a critic of its own begins as, of the policy's vocabulary; default: `model`."""
    critic_learning_rate: float | None = Field(default=None, gt=0)
    """Peak step size of a critic of its own, or of a shared one's head; default: ten times
    learning_rate."""
    value_coefficient: float = Field(default=0.1, gt=0)
    """Weight of a shared critic's loss beside the policy's."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move within a step before the gradient stops, in units of the reward."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Calls sampled by a policy more versions old than this are left out of the loss."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the starting model; above 0 keeps a frozen copy of it."""
    kl_in_reward: bool = False
    """Take the KL term off the reward of each token (PPO, REINFORCE++), not into the loss."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """In the loss: k2, whose gradient is that of the divergence, or k3, GRPO's. In the reward it
    is always k1."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, which keeps the policy trying what it rarely does."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens in one forward pass of the learner, padding included."""


class ScaleSettings(Settings):
    """What makes room for larger models."""

    lora_rank: int | None = Field(default=None, ge=1)
    """Train a LoRA adapter of this rank in the place of all weights; needs `fulmen[lora]`."""
    lora_alpha: int | None = Field(default=None, ge=1)
    """What the adapter adds is multiplied by this ÷ rank; default: twice the rank."""
    lora_targets: Annotated[tuple[str, ...], BeforeValidator(words)] = ()
    """Names of the layers that get an adapter, as in `q_proj,v_proj`; default: all linear ones."""
    activation_checkpointing: bool = False
    """Keep only the input of each layer for the backward pass, and compute the rest again there."""
    offload_optimiser: bool = False
    """Keep the optimiser's state in the CPU's memory, and step there."""


class TrainConfig(CreditSettings, LossSettings, ScaleSettings, RunSettings):
    """Settings of `fulmen train`."""

    algorithm: Annotated[str | None, Common] = None
    """A set of settings by its usual name, `grpo` or `dapo` say; what is set beside it wins."""
    val: Annotated[str | None, Common] = None
    """Held-out tasks, from where `tasks` may be; measured before, during and after training."""
    steps: Annotated[int, Common, Field(ge=1)] = 100
    """Steps of the training loop, each with tasks-per-step × group-size rollouts."""
    tasks_per_step: Annotated[int, Common, Field(ge=1)] = 16
    """Tasks in one step; any number is fine."""
    group_size: Annotated[int, Common, Field(ge=1)] = 8
    """Rollouts of each task in a step, compared with each other by most kinds of `advantage`."""
    learning_rate: Annotated[float, Common, Field(gt=0)] = 1e-6
    """Peak step size of AdamW. About 1e-6 for models of billions, 1e-3 for a tiny one."""
    warmup_steps: int = Field(default=5, ge=0)
    """Steps, each with all its updates, over which the learning rate rises to its peak."""
    schedule: Literal["constant", "linear"] = "constant"
    """After warm-up: stay, or fall in a line to 5 % at the last update."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimiser steps of one pass over a step's rollouts, each on its own share of them."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each step's rollouts: more is learned from each, as far as the loss's trust
    region lets it."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients longer than this are shortened to it."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    adam_beta2: float = Field(default=0.95, gt=0, lt=1)
    """AdamW's decay of squared gradients; below the usual 0.999 because RL gradients change."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts; wins over the agent's own."""
    on_agent_error: Literal["penalise", "exclude"] = "penalise"
    """An agent that raises or exits non-zero: give it `agent_error_reward`, or leave it out."""
    agent_error_reward: float = 0.0
    """Reward of a rollout whose agent failed, with `on_agent_error = "penalise"`."""
    eval_every: int = Field(default=25, ge=0)
    """Measure the held-out tasks every so many steps; 0: only before and after."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Write a checkpoint every so many steps, and always at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older checkpoints are deleted, this many of the newest stay."""
    keep_rollouts: int | None = Field(default=None, ge=1)
    """Steps whose calls and spans are kept, the newest ones; default: all. Rewards and outcomes
    stay in any case. See docs/store.md."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:  # noqa: ANN401 - pydantic's
        return with_preset(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        for sentence in misfits(dict(self), defaults):
            raise ValueError(sentence)
        return self
