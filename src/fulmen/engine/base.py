"""What an engine promises: token ids in, token ids and log-probabilities out.

An engine knows no messages, no chat templates and no text. Those live in the gateway, once for all
engines.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fulmen.schema.errors import ContextOverflow

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What callers must know about the model behind an engine."""

    model: str
    """Name shown to clients."""
    max_context: int
    """Prompt and completion together, tokens."""
    vocab_size: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample."""

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    """0 is greedy: the most likely token, whose log-probability is then reported at
    temperature 1."""
    top_p: float = 1.0
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    """Sampling one of these ends the completion; it is its last token."""
    seed: int | None = None
    """Same seed, same prompt, same weights: same tokens, up to rounding. None: unpredictable."""
    grammar: str = ""
    """What the completion must match (Lark, llguidance's dialect) before a stop token may end it;
    empty: anything."""
    top_logprobs: int = 0
    """How many of the most likely tokens to report beside each sampled one."""
    stream: bool = True
    """False: one delta at the end, which spares the event loop a wake-up per token."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens sampled since the last delta. The last one carries a finish reason."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Nats, under the sampling distribution (after grammar, temperature and top-p)."""
    version: int
    """The policy version that sampled these tokens."""
    finish_reason: FinishReason | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per token: (id, log-probability) of the most likely ones, best first."""


class Engine(Protocol):
    """Serves one policy. Used from an event loop; may compute in threads or elsewhere."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def version(self) -> int:
        """Version of the weights that the next token will be sampled from."""
        ...

    def check_grammar(self, grammar: str) -> None:
        """Whether completions can be held to a grammar.

        Raises:
            GrammarError: it has an error, or this engine samples freely only.
        """
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Sample one completion, token by token.

        Closing the iterator (`aclose`, cancellation, `break` in `async for` over a closing
        context) aborts the request at the next token.

        Raises:
            ContextOverflow: as `check_request` says.
            GrammarError: as `check_grammar` says, or the grammar leads nowhere.
            EngineError: the engine failed or was closed.
        """
        ...

    async def close(self) -> None:
        """Abort what is running and release everything."""
        ...


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """What every engine refuses before it begins.

    Raises:
        ContextOverflow: the prompt is empty, no token is wanted, or both together do not fit.
    """
    length = len(request.prompt_ids)
    if length == 0 or request.max_tokens < 1:
        raise ContextOverflow("the prompt is empty, or no token is to be sampled")
    if length + request.max_tokens > info.max_context:
        raise ContextOverflow(
            f"{length} prompt tokens and {request.max_tokens} to sample do not fit the "
            f"context of {info.max_context}"
        )
