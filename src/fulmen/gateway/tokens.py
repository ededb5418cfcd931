"""A tokenizer of transformers, cut down to what rendering needs.

Its own `encode` and `decode` spend most of their time on options that nobody uses here, and the
renderers ask for character offsets wherever a tokenizer has them, to throw them away. In front of
short prompts both cost more than all the rest of a request.
"""

import functools
from collections.abc import Sequence
from typing import Any

_SHORT = 200
"""Characters; texts up to this length are the scaffold that every message repeats."""
_MOST_TEXTS = 4096


class LeanTokenizer:
    """Encodes and decodes by the Rust tokenizer inside; the rest is the whole tokenizer's."""

    def __init__(self, whole: Any) -> None:  # noqa: ANN401 - transformers' tokenizers share no type
        """`whole` must be a fast tokenizer."""
        self._whole = whole
        self._core = whole.backend_tokenizer
        # Some tokenizers tidy spaces before punctuation, in Python.
        self._tidies = bool(getattr(whole, "clean_up_tokenization_spaces", False))
        self._encode_short = functools.lru_cache(_MOST_TEXTS)(self._encode)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        # A tokenizer that can be called is one that the renderers ask for offsets.
        if name == "__call__" or "_whole" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._whole, name)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text to token ids; spelled-out structural tokens become their ids."""
        if add_special_tokens:
            return self._whole.encode(text)
        return list(self._encode_short(text) if len(text) <= _SHORT else self._encode(text))

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        if self._tidies or isinstance(token_ids, int):
            return self._whole.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _encode(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids
