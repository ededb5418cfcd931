"""Policies: model folders, named, loaded and served."""

import os
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fulmen.credit.selection import patterns_of
from fulmen.engine.grammar import GrammarCompiler
from fulmen.engine.model import LoadedModel, load_model
from fulmen.engine.platform import place, prepare_process
from fulmen.engine.pytorch.engine import LocalEngine
from fulmen.gateway.exchange import Policy
from fulmen.gateway.render import ChatRenderer, make_renderer
from fulmen.schema.config import RunSettings, ServeConfig
from fulmen.schema.errors import ConfigError

_POLICIES = "policies"
"""Within a checkpoint, beside the files of the first policy."""


@dataclass(frozen=True, slots=True)
class PolicySource:
    """A policy as the settings name it; nothing is loaded yet."""

    name: str
    """Shown to clients, and carried by calls."""
    model: str
    """Folder or Hub id of what it begins with."""
    agents: tuple[str, ...] = ()
    """Patterns of the agents whose model it is; none: of all that have no other."""
    place: str = "."
    """Its folder within a checkpoint."""


def main_source(model: str) -> PolicySource:
    """The policy of agents that have no other.

    >>> main_source("Qwen/Qwen3-1.7B").name
    'Qwen3-1.7B'
    """
    return PolicySource(Path(model).name or model, model)


def policy_sources(settings: RunSettings) -> list[PolicySource]:
    """All policies of a run, the main one first.

    Raises:
        ConfigError: a policy of an agent has the name of the main one.
    """
    main = main_source(settings.model)
    if main.name in settings.policies:
        raise ConfigError(
            f"policy {main.name!r} has the name of the model of all other agents",
            hint="rename the model's folder",
        )
    # Patterns have characters that no folder's name should.
    own = [
        PolicySource(name, model, patterns_of(name), f"{_POLICIES}/{quote(name, safe='')}")
        for name, model in settings.policies.items()
    ]
    return [main, *own]


def check_same_policies(sources: Sequence[PolicySource], checkpoint: Path) -> None:
    """Raises ConfigError if a checkpoint is of other policies than these."""
    kept = {f"{_POLICIES}/{folder.name}" for folder in checkpoint.glob(f"{_POLICIES}/*")}
    for source in sources[1:]:
        if source.place not in kept:
            raise ConfigError(
                f"{checkpoint} has no policy {source.name!r}: the run was begun without it",
                hint="begin a new run for it",
            )
    if lost := sorted(kept - {source.place for source in sources}):
        name = unquote(lost[0].removeprefix(f"{_POLICIES}/"))
        raise ConfigError(
            f"{checkpoint} has a policy {name!r}, which the settings do not name",
            hint=f"give --policy '{name}=…' as when the run was begun",
        )


def model_threads(threads: int | None) -> int:
    """CPU threads for the model: all cores but one, which the agents and the gateway need."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return threads or max(1, (cores or 1) - 1)


def pick_device(device: str) -> str:
    """The device that `auto` stands for, after checking one that was named.

    Raises:
        ConfigError: a device that this machine does not have, or not for so many processes.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = place()[1]
    if processes > 1 and device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    elif processes > 1 and device.startswith("cuda:"):
        raise ConfigError(f"device {device!r} is one for {processes} processes", hint="say cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:160]
        raise ConfigError(f"device {device!r} cannot be used ({reason})") from None
    return device


def load_policy(folder: Path | str, settings: RunSettings | ServeConfig) -> LoadedModel:
    """Load a model, with the process set right for it first."""
    prepare_process(threads=model_threads(settings.threads))
    return load_model(folder, dtype=settings.dtype, device=pick_device(settings.device))


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy with everything that serving it takes."""

    source: PolicySource
    loaded: LoadedModel
    renderer: ChatRenderer
    grammars: GrammarCompiler
    engine: LocalEngine
    adapter: str | None = None
    """Of several in the model, the one that is this policy."""

    @property
    def as_policy(self) -> Policy:
        """As the gateway knows it."""
        return Policy(self.source.name, self.engine, self.renderer)


def make_voice(tokenizer: Any, config: Any) -> tuple[ChatRenderer, GrammarCompiler]:  # noqa: ANN401 - transformers'
    """What turns messages into a model's tokens, and what knows which tokens a form allows."""
    renderer = make_renderer(tokenizer, config.model_type)
    vocabulary = config.get_text_config().vocab_size
    return renderer, GrammarCompiler(tokenizer, vocabulary, renderer.stop_ids)


def serve_policy(
    source: PolicySource,
    settings: RunSettings | ServeConfig,
    *,
    folder: Path | str | None = None,
    shape: Callable[[Any], None] = lambda _: None,
    adapter: str | None = None,
) -> ServedPolicy:
    """Load a policy, as it came or as `folder` has it, and serve it from this process; the caller
    closes the engine.

    `shape` is applied to the model before it is served: adapters are put into it; of several,
    `adapter` is the policy's.
    """
    loaded = load_policy(folder or source.model, settings)
    shape(loaded.model)
    renderer, grammars = make_voice(loaded.tokenizer, loaded.model.config)
    engine = LocalEngine(
        loaded.model,
        name=source.name,
        max_context=loaded.max_context,
        max_batch=settings.max_batch,
        grammars=grammars,
        adapter=adapter,
    )
    return ServedPolicy(source, loaded, renderer, grammars, engine, adapter)


@asynccontextmanager
async def served_policies(
    sources: Sequence[PolicySource],
    serve: Callable[[Sequence[PolicySource]], Sequence[ServedPolicy]],
    *,
    base: Callable[[PolicySource], Hashable] = lambda source: source.name,
) -> AsyncIterator[list[ServedPolicy]]:
    """All policies of a run, sampled at the same time; in their order. Engines are closed when the
    context is left.

    `serve` is given those of equal `base` together: they share a model, others have their own.

    Raises:
        ModelError: one of them cannot be served.
    """
    groups: dict[Hashable, list[PolicySource]] = {}
    for source in sources:
        groups.setdefault(base(source), []).append(source)
    async with AsyncExitStack() as stack:
        served: dict[str, ServedPolicy] = {}
        for group in groups.values():
            for policy in serve(group):
                served[policy.source.name] = policy
                stack.push_async_callback(policy.engine.close)
        yield [served[source.name] for source in sources]
