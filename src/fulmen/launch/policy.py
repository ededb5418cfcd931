"""Policies: model folders, named and served; loading them is the affair of `loading.py`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fulmen.credit.selection import patterns_of
from fulmen.engine.base import Engine
from fulmen.engine.grammar import GrammarCompiler
from fulmen.gateway.exchange import Policy
from fulmen.gateway.render import ChatRenderer, make_renderer
from fulmen.schema.config import RunSettings
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


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy with what serving it takes."""

    source: PolicySource
    engine: Engine
    renderer: ChatRenderer

    def as_policy(self, *, frozen: bool = False) -> Policy:
        """As the gateway knows it."""
        return Policy(self.source.name, self.engine, self.renderer, frozen=frozen)


def make_voice(tokenizer: Any, config: Any) -> tuple[ChatRenderer, GrammarCompiler]:  # noqa: ANN401 - transformers'
    """What turns messages into a model's tokens, and what knows which tokens a form allows."""
    renderer = make_renderer(tokenizer, config.model_type)
    vocabulary = config.get_text_config().vocab_size
    return renderer, GrammarCompiler(tokenizer, vocabulary, renderer.stop_ids)
