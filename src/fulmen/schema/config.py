"""Every setting of Fulmen, once: Python keyword, TOML key and command-line flag are this surface.

`group_size=8` in Python is `group_size = 8` in TOML and `--group-size 8` on the command line. The
docstring under a field is its help text; `common` marks the few that `--help` shows.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    PlainSerializer,
    ValidationError,
)

from fulmen.schema.errors import ConfigError
from fulmen.schema.place import checked_url, without_password
from fulmen.schema.records import LONGEST_PAUSE_S, RetriedFailure


class _Common:
    """Marker: shown by plain `--help`."""


Common = _Common()


@dataclass(frozen=True)
class Repeated:
    """Marker: on the command line a flag of this name, given once for each entry."""

    flag: str


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


def _entries(value: object) -> object:
    """`--policy` flags of the command line as the dict of TOML and Python.

    >>> _entries(["writer=models/a", "re*=models/b"])
    {'writer': 'models/a', 're*': 'models/b'}
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    entries: dict[str, str] = {}
    for entry in value:
        agents, equals, model = str(entry).partition("=")
        if not equals:
            raise ValueError(f"{entry!r} has no '='; write agents=model")
        if agents.strip() in entries:
            raise ValueError(f"{agents.strip()!r} is there twice; a policy is of one model")
        entries[agents.strip()] = model.strip()
    return entries


def _policies(value: dict[str, str]) -> dict[str, str]:
    for agents, model in value.items():
        if not agents.strip(" .,"):
            raise ValueError(f"{agents!r} names no agent")
        if not model:
            raise ValueError(f"the policy of {agents!r} has no model")
    return value


Policies = Annotated[
    dict[str, str], BeforeValidator(_entries), AfterValidator(_policies), Repeated("policy")
]
"""Agents to the model of their own."""


def words(value: object) -> object:
    """`"q_proj,v_proj"` of the command line as the tuple of TOML and Python.

    >>> words("q_proj, v_proj")
    ('q_proj', 'v_proj')
    """
    if not isinstance(value, str):
        return value
    return tuple(word.strip() for word in value.split(",") if word.strip())


RetryOn = Annotated[tuple[RetriedFailure, ...], BeforeValidator(words)]
"""Failures that another attempt follows."""


StoreUrl = Annotated[
    str, AfterValidator(checked_url), PlainSerializer(without_password, when_used="json")
]
"""URL of a database. What is written down of it has no password."""


class RunSettings(Settings):
    """What training and evaluation share: an agent, tasks, a grader and a model."""

    agent: Annotated[str, Common]
    """`file.py:function`, `package.module:function`, any shell command, or the URL of a server."""
    tasks: Annotated[str, Common]
    """JSONL, CSV, TSV or Parquet file, folder (or `folder:split`) that `datasets` saved, or
    `file.py:function` that gives tasks; their `metadata` is shown to the grader only."""
    model: Annotated[str, Common]
    """Folder or Hub id of a Hugging Face causal language model with a chat template."""
    grader: Annotated[str | None, Common] = None
    """`file.py:function` that scores an answer; leave out if the agent returns its own reward."""
    policies: Policies = {}
    """`agents=model`, repeatable: agents (names or patterns with commas) with a model of their own,
    which is trained on their calls; all other agents have `model`."""
    reward_weights: RewardWeights | None = None
    """`name=number,…`: what the named rewards of a grader's dict, of rules and of the agent are
    multiplied with before they are added up; 1 for a name that is not there."""
    out: Annotated[str | None, Common] = None
    """Folder of the run; default `runs/` and a name made from agent and time."""
    store: StoreUrl | None = None
    """`postgresql://user@host/database`: keep the run's record there, in a schema of its own (or
    in `?schema=name`); default: `run.db`, in the run folder. See docs/store.md."""
    workers: Annotated[int, Common, Field(ge=0)] = 32
    """How many agents run at the same time; 1 makes a run repeatable token by token; 0: none here,
    `fulmen work` runs them elsewhere."""
    seed: int = 0
    """Decides task order and every sampled token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Upper bound of one completion, tokens; default: what the model's context leaves."""
    deadline_s: float = Field(default=300.0, gt=0)
    """An agent that works longer on one task, seconds, is stopped."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per rollout when what `retry_on` names happens; other failures are final."""
    retry_on: RetryOn = ("infrastructure", "timeout")
    """Failures that are followed by another attempt: `infrastructure`, `timeout`, `agent` (the
    agent's own), with commas."""
    retry_pause_s: float = Field(default=1.0, ge=0, le=LONGEST_PAUSE_S)
    """Pause before the second attempt, seconds; it doubles with each, up to a minute."""
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
    """Address the gateway listens on; 0.0.0.0 lets agents of other machines in."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gateway; 0 takes a free one."""
    if_exists: Literal["fail", "resume", "new"] = "fail"
    """What to do when the run folder exists: stop, go on with it, or take a new name beside it."""


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


class WorkConfig(Settings):
    """Settings of `fulmen work`."""

    server: Annotated[str, Common]
    """URL of the run's server, as `fulmen train` prints it."""
    agent: Annotated[str, Common]
    """`file.py:function`, `package.module:function`, any shell command, or the URL of a server."""
    key_file: Annotated[str | None, Common] = None
    """File with the run's worker key (`worker.key` in its folder); default: the key itself in the
    environment, as FULMEN_WORKER_KEY."""
    workers: Annotated[int, Common, Field(ge=1)] = 32
    """How many agents run here at the same time."""
    processes: Annotated[int | None, Common, Field(ge=1)] = None
    """Worker processes that share the agents; default: one per core."""
    tracing: bool = True
    """Watch the agent's framework: who called, which tools ran, how they ended."""
    lease_s: float = Field(default=60.0, ge=1, le=86400)
    """A worker that is not heard of for so long, seconds, has its rollouts taken away."""
    patience_s: float = Field(default=600.0, gt=0)
    """A server that is away is waited for so long, seconds."""


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
        given = first["input"]
        if isinstance(given, str) and "://" in given:
            given = without_password(given)
        raise ConfigError(f"{origin}: {name} is {given!r}: {message}{more}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint naming the most similar known word, or all of them.

    >>> nearest("group-size", ["group_size", "seed"])
    "did you mean 'group_size'?"
    """
    known = list(known)
    close = difflib.get_close_matches(word.replace("-", "_"), known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(sorted(known))
