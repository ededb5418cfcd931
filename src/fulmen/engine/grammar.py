"""Which tokens a grammar allows next.

Engine and learner share this, so that a token sampled under a grammar is scored under the same
distribution: the model's, renormalised over what was allowed. The work is done by llguidance.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fulmen.schema.errors import GrammarError

_MOST_COMPILED = 256
"""Grammars kept compiled; the one unused for longest goes first."""

Mask = npt.NDArray[np.int32]
"""(⌈V/32⌉,) bits, lowest first: token i is allowed if bit i mod 32 of word i div 32 is set."""


class GrammarCompiler:
    """Compiles grammars for one model's tokens; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - a fast tokenizer of transformers
        vocab_size: int,
        stop_ids: frozenset[int],
    ) -> None:
        """`vocab_size` is that of the logits, padding included; one of `stop_ids` must follow a
        text that the grammar accepts."""
        self._tokenizer = tokenizer
        self._size = max(vocab_size, len(tokenizer))
        """Tokens that there are names or logits for."""
        self._stop_ids = sorted(stop_ids)
        words = -(-vocab_size // 32)
        self._known = _bits(range(min(len(tokenizer), vocab_size)), words)
        """Everything but the padding of the embedding."""
        self._stops = _bits(self._stop_ids, words)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._compiling = threading.Lock()

    def start(self, grammar: str) -> "Matcher":
        """A matcher before the first token.

        Raises:
            GrammarError: the grammar (Lark, llguidance's dialect) has an error, or the tokenizer is
                none that llguidance can read.
        """
        with self._compiling:
            compiled = self._compile(grammar).deep_copy()
            return Matcher(compiled, self._size, self._known, self._stops)

    def masks(self, grammar: str, completion: Sequence[int]) -> Iterator[Mask]:
        """What was allowed at each token of a completion.

        Raises:
            GrammarError: the completion does not match the grammar.
        """
        matcher = self.start(grammar)
        for token in completion:
            yield matcher.mask()
            matcher.advance(token)

    @functools.cached_property
    def _tokens(self) -> Any:  # noqa: ANN401 - an LLTokenizer
        """Made when first needed: a large vocabulary takes a second."""
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._size, eos_token=self._stop_ids)
        except Exception as error:  # llguidance raises whatever its bindings make of a Rust error
            reason = _reason(str(error)) or type(error).__name__
            raise GrammarError(f"this tokenizer allows no grammars ({reason})") from None

    def _compile(self, grammar: str) -> Any:  # noqa: ANN401 - an LLMatcher
        from llguidance import LLMatcher

        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = LLMatcher(self._tokens, grammar, log_level=0)
            if compiled.is_error():
                raise GrammarError(_reason(compiled.get_error()))
            self._compiled[grammar] = compiled
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled


class Matcher:
    """How far a completion has come in its grammar."""

    def __init__(self, matcher: Any, size: int, known: Mask, stops: Mask) -> None:  # noqa: ANN401
        self._matcher = matcher
        self._size = size
        self._known = known
        self._stops = stops
        self.ended = False
        """Whether a stop token was taken."""

    def mask(self) -> Mask:
        """The tokens allowed next, at least one; a stop token where the text may end.

        Raises:
            GrammarError: the grammar leads to a point from which no token goes on.
        """
        from llguidance.numpy import fill_next_token_bitmask

        if self._matcher.is_stopped():
            return self._stops
        mask = np.zeros((1, -(-self._size // 32)), dtype=np.int32)
        fill_next_token_bitmask(self._matcher, mask, 0)
        allowed = mask[0, : len(self._known)] & self._known
        if self._matcher.is_error() or not allowed.any():
            reason = _reason(self._matcher.get_error()) or "no token can follow"
            raise GrammarError(f"the grammar cannot be followed ({reason})")
        return allowed

    def advance(self, token: int) -> None:
        """Take a token.

        Raises:
            GrammarError: the token was not allowed.
        """
        may_end = self._matcher.is_stopped() or self._matcher.is_accepting()
        if may_end and not self.ended and _has(self._stops, token):
            self.ended = True
        elif self.ended or not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not match the grammar")


def _bits(ids: Sequence[int], words: int) -> Mask:
    """
    >>> _bits([0, 33], 2).tolist()
    [1, 2]
    """
    places = np.asarray(ids, dtype=np.int64)
    mask = np.zeros(words, dtype=np.uint32)
    np.bitwise_or.at(mask, places // 32, np.uint32(1) << (places % 32).astype(np.uint32))
    return mask.view(np.int32)


def _has(mask: Mask, token: int) -> bool:
    return 0 <= token < 32 * len(mask) and bool(mask[token // 32] >> (token % 32) & 1)


def _reason(error: str) -> str:
    """The one line of a report that says what is wrong, without the quoted grammar."""
    return error.strip().splitlines()[0][:300] if error.strip() else ""
