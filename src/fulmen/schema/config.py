"""Every setting of Fulmen, once: Python keyword, TOML key and command-line flag are this surface.

`group_size=8` in Python is `group_size = 8` in TOML and `--group-size 8` on the command line. The
docstring under a field is its help text; `common` marks the few that `--help` shows.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from fulmen.schema.errors import ConfigError


class _Common:
    """Marker: shown by plain `--help`."""


Common = _Common()


class Settings(BaseModel):
    """Base: frozen, checked, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def common_fields(cls) -> tuple[str, ...]:
        """Names that plain `--help` shows; the rest is under `--help-all`."""
        return tuple(n for n, f in cls.model_fields.items() if Common in f.metadata)


def _weights(value: object) -> object:
    """`"f1=0.9,format=0.1"` of the command line as the dict of TOML and Python.

    >>> _weights("f1=0.9, format=0.1")
    {'f1': '0.9', 'format': '0.1'}
    """
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if not all(name.strip() and number.strip() for name, _, number in pairs):
        raise ValueError("write name=number, with commas between")
    return {name.strip(): number.strip() for name, _, number in pairs}


RewardWeights = Annotated[dict[str, FiniteFloat], BeforeValidator(_weights)]
"""Name of a reward to what it is multiplied with."""


GROUP_ADVANTAGES = ("grpo", "group-mean", "rloo", "maxrl")
"""They compare the rollouts of a group with each other."""
CRITIC_ADVANTAGES = ("gae", "turn-gae")
ADVANTAGES = (*GROUP_ADVANTAGES, "batch-mean", "none", *CRITIC_ADVANTAGES)


def _advantage(value: str) -> str:
    """One of the names, or a function's."""
    if value not in ADVANTAGES and not re.search(r"\w:\w+$", value):
        raise ValueError(f"{nearest(value, ADVANTAGES)}; or file.py:function")
    return value


class RunSettings(Settings):
    """What training and evaluation share: an agent, tasks, a grader and a model."""

    agent: Annotated[str, Common]
    """`file.py:function`, `package.module:function`, any shell command, or the URL of a server."""
    tasks: Annotated[str, Common]
    """JSONL file, one task a line; its `metadata` is shown to the grader only."""
    model: Annotated[str, Common]
    """Folder or Hub id of a Hugging Face causal language model with a chat template."""
    grader: Annotated[str | None, Common] = None
    """`file.py:function` that scores an answer; leave out if the agent returns its own reward."""
    reward_weights: RewardWeights | None = None
    """`name=number,…`: what the named rewards of a grader's dict, of rules and of the agent are
    multiplied with before they are added up; 1 for a name that is not there."""
    out: Annotated[str | None, Common] = None
    """Folder of the run; default `runs/` and a name made from agent and time."""
    workers: Annotated[int, Common, Field(ge=1)] = 32
    """How many agents run at the same time; 1 makes a run repeatable token by token."""
    seed: Annotated[int, Common] = 0
    """Decides task order and every sampled token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Upper bound of one completion, tokens; default: what the model's context leaves."""
    deadline_s: float = Field(default=300.0, gt=0)
    """An agent that works longer on one task, seconds, is stopped."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per rollout when the infrastructure fails; the agent's own failures count once."""
    other_models: str | None = None
    """TOML file of models elsewhere or frozen, for calls and agents that are not trained."""
    tracing: bool = True
    """Watch the agent's framework: who called, which tools ran, how they ended."""
    otlp_endpoint: str | None = None
    """Send finished rollouts to this tracing backend too (Jaeger, Phoenix …): OTLP over HTTP."""
    processes: int | None = Field(default=None, ge=1)
    """Worker processes that share the agents; default: one per core."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights; bfloat16 keeps float32 master weights in the optimiser."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1` …; `auto` takes a GPU if there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the model; default: all cores but one, at least one."""
    max_batch: int = Field(default=256, ge=1)
    """Completions the engine works on at once."""
    host: str = "127.0.0.1"
    """Address the gateway listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gateway; 0 takes a free one."""
    if_exists: Literal["fail", "resume", "new"] = "fail"
    """What to do when the run folder exists: stop, go on with it, or take a new name beside it."""


class TrainConfig(RunSettings):
    """Settings of `fulmen train`."""

    val: Annotated[str | None, Common] = None
    """JSONL file of held-out tasks; measured before, during and after training."""
    steps: Annotated[int, Common, Field(ge=1)] = 100
    """Steps of the training loop, each with tasks-per-step × group-size rollouts."""
    tasks_per_step: Annotated[int, Common, Field(ge=1)] = 16
    """Tasks in one step; any number is fine."""
    group_size: Annotated[int, Common, Field(ge=1)] = 8
    """Rollouts of each task in a step, compared with each other by most kinds of `advantage`."""
    learning_rate: Annotated[float, Common, Field(gt=0)] = 1e-6
    """Peak step size of AdamW. About 1e-6 for models of billions, 1e-3 for a tiny one."""
    warmup_steps: int = Field(default=5, ge=0)
    """Steps over which the learning rate rises to its peak."""
    schedule: Literal["constant", "linear"] = "constant"
    """After warm-up: stay, or fall in a line to 5 % at the last step."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimiser steps taken on each step's rollouts, each on its own share of them."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio may fall to 1 − this before the gradient stops."""
    clip_high: float = Field(default=0.28, gt=0)
    """The probability ratio may rise to 1 + this before the gradient stops."""
    advantage: Annotated[str, AfterValidator(_advantage)] = "grpo"
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
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL term against the starting model; above 0 keeps a frozen copy of it."""
    kl_in_reward: bool = False
    """Take the KL term off the reward of each token (PPO, REINFORCE++), not into the loss."""
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
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus, which keeps the policy trying what it rarely does."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients longer than this are shortened to it."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    adam_beta2: float = Field(default=0.95, gt=0, lt=1)
    """AdamW's decay of squared gradients; below the usual 0.999 because RL gradients change."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts; wins over the agent's own."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens in one forward pass of the learner, padding included."""
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

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.group_size == 1 and self.advantage in GROUP_ADVANTAGES:
            raise ValueError(
                f"group_size is 1 and advantage {self.advantage!r} compares the rollouts of a "
                "group; make it 2 or more, or take batch-mean, none or gae"
            )
        if self.group_size == 1 and self.dynamic_sampling:
            raise ValueError("dynamic_sampling looks for groups that differ; group_size is 1")
        if self.advantage in CRITIC_ADVANTAGES and self.credit != "identical":
            raise ValueError(
                f"credit {self.credit!r} does not go with advantage {self.advantage!r}, "
                "where the critic tells which call earned what"
            )
        if self.whitening == "task" and self.task_kind is None:
            raise ValueError("whitening 'task' needs task_kind, a key of the tasks' metadata")
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ValueError(
                f"overlong_buffer is {self.overlong_buffer}, more than overlong_tokens, of which "
                "it is the last part"
            )
        if self.kl_in_reward and self.kl_coefficient == 0:
            raise ValueError("kl_in_reward needs a kl_coefficient above 0")
        return self


class EvalConfig(RunSettings):
    """Settings of `fulmen eval`."""

    samples: Annotated[int, Common, Field(ge=1)] = 1
    """Rollouts per task."""
    temperature: Annotated[float, Common, Field(ge=0)] = 0.0
    """0 decodes greedily; 1 samples as in training."""


class ServeConfig(Settings):
    """Settings of `fulmen serve`."""

    model: Annotated[str, Common]
    """Folder or Hub id of a Hugging Face causal language model with a chat template."""
    host: Annotated[str, Common] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Common, Field(ge=0, le=65535)] = 8420
    """Port to listen on; 0 takes a free one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1` …; `auto` takes a GPU if there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the model; default: all cores but one, at least one."""
    max_batch: int = Field(default=256, ge=1)
    """Completions the engine works on at once."""
    other_models: str | None = None
    """TOML file of models elsewhere or frozen, which clients may ask for by name."""


S = TypeVar("S", bound=Settings)


def make_config(
    kind: type[S], values: Mapping[str, Any], *, origin: str = "settings", flags: bool = True
) -> S:
    """Check values against a settings class; `flags`: they can be given as flags, too.

    Raises:
        ConfigError: an unknown key (with the nearest one), a missing or an unfit value; one line,
            the first offender and how many more.

    >>> make_config(ServeConfig, {"model": "m", "prot": 80}, origin="serve.toml")
    Traceback (most recent call last):
    fulmen.schema.errors.ConfigError: serve.toml: there is no setting 'prot'; did you mean 'port'?
    """
    for key in values:
        if key not in kind.model_fields:
            hint = nearest(key, kind.model_fields)
            raise ConfigError(f"{origin}: there is no setting {key!r}", hint=hint)
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first, *rest = error.errors()
        name = ".".join(str(part) for part in first["loc"]) or "settings"
        more = f" (and {len(rest)} more)" if rest else ""
        if first["type"] == "missing":
            flag = f"give --{name.replace('_', '-')}, or {name} = … in the TOML file"
            hint = flag if flags else f"write {name} = …"
            raise ConfigError(f"{origin}: {name} is missing{more}", hint=hint) from None
        message = first["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        if not first["loc"]:  # not one value is wrong, but how several go together
            raise ConfigError(f"{origin}: {message}{more}") from None
        raise ConfigError(f"{origin}: {name} is {first['input']!r}: {message}{more}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint naming the most similar known word, or all of them.

    >>> nearest("group-size", ["group_size", "seed"])
    "did you mean 'group_size'?"
    """
    known = list(known)
    close = difflib.get_close_matches(word.replace("-", "_"), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(sorted(known))
