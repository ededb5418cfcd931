"""Which attempt the running code belongs to, and which agent of it."""

import contextvars
import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fulmen.schema.records import Record

LANGGRAPH_ITSELF = "langchain_create_agent"
"""How LangChain marks the graphs that its own agents are made of; their nodes are no agents."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt as its own process knows it."""

    rollout_id: str
    number: int
    emit: Callable[[Record], None]
    """Takes spans and rewards to the store; may be called from any thread."""

    @property
    def trace_id(self) -> int:
        """The trace that all spans of the attempt belong to, in whatever process."""
        return trace_id_of(self.rollout_id, self.number)


current_attempt: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar(
    "fulmen_attempt", default=None
)


def trace_id_of(rollout_id: str, attempt: int) -> int:
    """128 bits that follow from rollout and attempt; never 0, which is no trace id.

    >>> trace_id_of("r", 1) == trace_id_of("r", 1) != trace_id_of("r", 2)
    True
    """
    digest = hashlib.blake2b(f"{rollout_id}/{attempt}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") or 1


def langgraph_agent() -> str | None:
    """The agent of a LangChain application: its given name, else the LangGraph node that runs.

    None outside of one, and within an agent that was given no name and is no node.
    """
    config = sys.modules.get("langchain_core.runnables.config")
    if config is None:
        return None
    settings: Mapping[str, Any] = config.var_child_runnable_config.get() or {}
    return agent_of_metadata(settings.get("metadata") or {})


def agent_of_metadata(metadata: Mapping[str, Any]) -> str | None:
    """Read LangChain's metadata of a run.

    >>> agent_of_metadata({"langgraph_node": "writer", "langgraph_checkpoint_ns": "writer:1f"})
    'writer'
    >>> agent_of_metadata({"langgraph_node": "model", "ls_integration": "langchain_create_agent",
    ...     "langgraph_checkpoint_ns": "planner:1f|model:2e"})
    'planner'
    """
    node = metadata.get("langgraph_node")
    # What runs inside of such an agent inherits its marks; a node of another name is none of its.
    if metadata.get("ls_integration") != LANGGRAPH_ITSELF or not _is_own(node):
        return node
    if name := metadata.get("lc_agent_name"):
        return name
    path = [part.partition(":")[0] for part in _namespace(metadata)[:-1]]
    return next((part for part in reversed(path) if not (part.isdigit() or _is_own(part))), None)


def _namespace(metadata: Mapping[str, Any]) -> list[str]:
    return str(metadata.get("langgraph_checkpoint_ns", "")).split("|")


def _is_own(node: object) -> bool:
    """Whether LangChain's agents have a node of this name: middleware's are `name.before_model`."""
    return node in ("model", "tools") or "." in str(node)
