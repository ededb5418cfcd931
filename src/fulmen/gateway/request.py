"""What is asked of a model, whichever protocol it came by."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fulmen.gateway.form import ForcedCall, JsonOutput
from fulmen.gateway.render import Message
from fulmen.schema.records import JSON


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request, checked. None: not given."""

    protocol: str
    body: Mapping[str, JSON]
    """As it came; unknown fields are kept."""
    model: str
    messages: list[Message] = field(default_factory=list)
    """In the form of chat completions, which the renderers understand."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Raw prompts, text or token ids, instead of messages."""
    tools: list[dict[str, JSON]] = field(default_factory=list)
    """Functions in the form of chat completions."""
    callable: tuple[str, ...] | None = None
    """Names of the tools that may be called; None: all."""
    output: JsonOutput | ForcedCall | None = None
    """What the answer must look like; None: anything."""
    parallel_calls: bool = True
    """Whether several tools may be called in one answer."""
    n: int = 1
    """Completions of each prompt."""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    template_options: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def callable_tools(self) -> list[dict[str, JSON]]:
        """The tools that may be called; the others are in the prompt all the same."""
        if self.callable is None:
            return self.tools
        return [tool for tool in self.tools if tool["function"]["name"] in self.callable]
