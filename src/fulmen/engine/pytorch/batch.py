"""The sequences being decoded together, and the tensors that compute their next tokens.

Sequence i of the batch owns slot i of the cache. When one leaves, the last takes its slot, so that
the active part of the cache is always one contiguous view.
"""

import math
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulmen.engine.adapted import Rows, chosen
from fulmen.engine.adapters import adapter_names
from fulmen.engine.pytorch.attention import CacheView, serving
from fulmen.engine.pytorch.dense import DenseForward, Part, supports
from fulmen.engine.pytorch.masks import forbid
from fulmen.engine.pytorch.prefix import BLOCK, BlockKey, PrefixCache
from fulmen.engine.pytorch.sampling import choose, uniforms
from fulmen.engine.pytorch.sequence import Sequence
from fulmen.schema.errors import EngineError

_LENGTH_UNIT = 64
"""Slots grow by so many tokens, so that growing is rare."""
_SUM_UNIT = 16
"""Attention sums over a multiple of so many keys, a divisor of the above. With ragged ends the
vectorised sums of one sequence would round differently next to a longer neighbour."""
_IMPOSSIBLE = -1e30
"""Log-probabilities below this are of forbidden tokens."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of each of some sequences, in their order."""

    ids: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]] | None


class Batch:
    """Slots, their keys and values, and the forward passes over them."""

    def __init__(self, model: PreTrainedModel, *, max_batch: int, prefix_bytes: int) -> None:
        self.sequences: list[Sequence] = []
        self.max_batch = max_batch
        self.prefilled_tokens = 0
        """Prompt tokens computed."""
        self.reused_tokens = 0
        """Prompt tokens whose keys and values were copied instead."""
        self._model = model
        self._several = len(adapter_names(model)) > 1
        self._dense = DenseForward(model) if supports(model) else None
        config = model.config.get_text_config()
        self._planes = 2 * config.num_hidden_layers
        self._heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None)
        self._width = width or config.hidden_size // config.num_attention_heads
        parameter = next(model.parameters())
        self._device = parameter.device
        self._cache = torch.empty(
            (self._planes, 0, self._heads, 0, self._width),
            dtype=parameter.dtype,
            device=self._device,
        )
        self._prefixes = PrefixCache(
            heads=self._heads,
            width=self._width,
            planes=self._planes,
            max_bytes=prefix_bytes,
            like=self._cache,
        )

    def missing_block(self, sequence: Sequence) -> BlockKey | None:
        """The first block of its tokens that is not in the prefix cache, if a full one is not."""
        return self._prefixes.match(sequence.ids, sequence.adapter)[1]

    def uncached(self, sequence: Sequence) -> int:
        """How many tokens its prefill would compute."""
        places, _ = self._prefixes.match(sequence.ids, sequence.adapter)
        return len(sequence.ids) - BLOCK * len(places)

    def step(self, wave: Items[Sequence], max_tokens: int) -> Sampled:
        """Sample the next token of every sequence: of those at work, and of a wave of new ones,
        which get slots behind them and whose tokens so far are computed in the same pass.

        Wide waves are computed in pieces of at most about `max_tokens` positions.
        """
        before = len(self.sequences)
        self.sequences += wave
        self._reserve(len(self.sequences), max(len(s.ids) for s in self.sequences) + 1)
        for slot, sequence in enumerate(wave, start=before):
            places, _ = self._prefixes.match(sequence.ids, sequence.adapter)
            self._prefixes.load(places, self._cache[:, slot])
            sequence.cached = len(places) * BLOCK
            self.reused_tokens += sequence.cached
            self.prefilled_tokens += len(sequence.ids) - sequence.cached
        last = self._last_hidden(before, wave, max_tokens)
        logits = self._project(last, self._rows(self.sequences, 1))
        for sequence in self.sequences:
            sequence.cached = len(sequence.ids)
        for slot, sequence in enumerate(wave, start=before):
            self._prefixes.store(sequence.ids, self._cache[:, slot], sequence.adapter)
        return self._sample(self.sequences, logits)

    def _last_hidden(self, before: int, wave: Items[Sequence], max_tokens: int) -> Tensor:
        """(B, E) of the last token of every sequence, of which the first `before` are at work."""
        widest = max((len(s.ids) - s.cached for s in wave), default=0)
        # A short sequence's padding may reach past its own tokens. Views are of the cache as it is
        # now: it may not grow until all are computed.
        self._reserve(len(self.sequences), max((s.cached for s in wave), default=0) + widest + 1)
        parts = [self._newest(before)] if before else []
        if not wave:
            return self._run(parts)[0][:, 0]
        piece = max(1, max_tokens // len(wave))
        first, *others = [self._piece(wave, before, at, piece) for at in range(0, widest, piece)]
        *at_work, head = self._run([*parts, first])
        hidden = torch.cat([head, *(self._run([other])[0] for other in others)], dim=1)
        ends = torch.tensor([len(s.ids) - s.cached - 1 for s in wave], device=self._device)
        new = hidden[torch.arange(len(wave), device=self._device), ends]
        return torch.cat([*(own[:, 0] for own in at_work), new])

    def _newest(self, count: int) -> tuple[Part, Rows | None]:
        """The last sampled token of each of the first sequences."""
        own = self.sequences[:count]
        tokens = torch.tensor([s.ids[-1] for s in own], device=self._device)
        positions = torch.tensor([s.cached for s in own], device=self._device)
        view = CacheView(
            self._cache, 0, positions[:, None], _rounded(max(s.cached for s in own) + 1)
        )
        return Part(tokens[:, None], view), self._rows(own, 1)

    def remove(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free a sequence's slot; `keep` leaves its full blocks in the prefix cache."""
        slot, last = self.sequences.index(sequence), len(self.sequences) - 1
        if keep:
            known = sequence.ids[: sequence.cached]
            self._prefixes.store(known, self._cache[:, slot], sequence.adapter)
        if slot != last:
            moved = self.sequences[last]
            self.sequences[slot] = moved
            length = moved.cached
            self._cache[:, slot, :, :length] = self._cache[:, last, :, :length]
        self.sequences.pop()

    def forget(self, adapter: str | None) -> list[Sequence]:
        """Empty slots and prefixes of an adapter because its weights changed; returns who had a
        slot."""
        evicted = [s for s in self.sequences if s.adapter == adapter]
        for sequence in reversed(evicted):  # from the last on, few have to move
            self.remove(sequence, keep=False)
            sequence.cached = 0
        self._prefixes.clear(adapter)
        if self._dense is not None:
            self._dense.refresh()
        return evicted

    def _piece(
        self, wave: Items[Sequence], first: int, at: int, piece: int
    ) -> tuple[Part, Rows | None]:
        """Columns at … at + C − 1 of each sequence's uncached tokens.

        Shorter sequences are padded at the end; what that writes lies beyond their length and is
        overwritten before it can be seen.
        """
        columns = max(min(piece, len(s.ids) - s.cached - at) for s in wave)
        ids = np.zeros((len(wave), columns), dtype=np.int64)
        for row, sequence in enumerate(wave):
            start = sequence.cached + at
            found = sequence.ids[start : start + columns]
            ids[row, : len(found)] = found
        starts = np.array([s.cached for s in wave]) + at
        positions = starts[:, None] + np.arange(columns)
        view = CacheView(
            self._cache,
            first,
            torch.as_tensor(positions, device=self._device),
            _rounded(int(positions.max()) + 1),
        )
        part = Part(torch.as_tensor(ids, device=self._device), view)
        return part, self._rows(wave, columns)

    def _rows(self, sequences: Items[Sequence], columns: int) -> Rows | None:
        """Which adapters so many tokens of each sequence have; None: there is no choice."""
        if not self._several:
            return None
        return Rows.of([s.adapter for s in sequences], columns, self._device)

    def _run(self, parts: Items[tuple[Part, Rows | None]]) -> list[Tensor]:
        """Hidden states (P, C, E) of each part: in one pass, where the model allows that."""
        if self._dense is None:
            return [self._alone(part, rows) for part, rows in parts]
        rows = [own for _, own in parts if own is not None]
        return self._dense.hidden([part for part, _ in parts], Rows.joined(rows) if rows else None)

    def _alone(self, part: Part, rows: Rows | None) -> Tensor:
        with serving(part.view), _computed(rows):
            return self._model.get_decoder()(
                input_ids=part.ids, position_ids=part.view.positions, use_cache=False
            ).last_hidden_state

    def _project(self, hidden: Tensor, rows: Rows | None) -> Tensor:
        if self._dense is not None:
            return self._dense.project(hidden, rows)
        with _computed(rows):
            return project(self._model, hidden)

    def _sample(self, sequences: Items[Sequence], logits: Tensor) -> Sampled:
        requests = [s.request for s in sequences]
        positions = np.array([len(s.ids) for s in sequences])
        drawn = uniforms(np.array([s.seed for s in sequences], dtype=np.uint64), positions)
        choice = choose(
            forbid(logits.float(), [s.mask() for s in sequences]),
            torch.tensor([r.temperature for r in requests], device=self._device),
            torch.tensor([r.top_p for r in requests], device=self._device),
            torch.as_tensor(drawn, device=self._device),
        )
        most = max(r.top_logprobs for r in requests)
        logprobs = choice.logprobs.tolist()
        if not math.isfinite(sum(logprobs)):
            raise EngineError(
                "the model's logits are not finite",
                hint="the weights hold NaN or infinity: lower the learning rate",
            )
        return Sampled(
            choice.ids.tolist(),
            logprobs,
            _top(choice.table, most) if most else None,
        )

    def _reserve(self, slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens."""
        _, have_slots, _, have_length, _ = self._cache.shape
        if slots <= have_slots and length <= have_length:
            return
        if slots > have_slots:
            slots = min(max(self.max_batch, slots), max(8, 2 * have_slots, slots))
        length = -(-length // _LENGTH_UNIT) * _LENGTH_UNIT
        shape = (
            self._planes,
            max(slots, have_slots),
            self._heads,
            max(length, have_length),
            self._width,
        )
        # Zeros, not garbage: a masked key of NaN would still poison the product with its weight 0.
        grown = self._cache.new_zeros(shape)
        grown[:, :have_slots, :, :have_length] = self._cache
        self._cache = grown


def _computed(rows: Rows | None) -> AbstractContextManager[None]:
    return nullcontext() if rows is None else chosen(rows)


def _rounded(length: int) -> int:
    return -(-length // _SUM_UNIT) * _SUM_UNIT


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """(…, E) hidden states to (…, V) logits, as the model's own forward does.

    Families that scale or cap their logits name the number in their configuration.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has output embeddings"
    logits = head(hidden)
    if scaling := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scaling
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


def _top(table: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The most likely tokens of each row, without those that a grammar forbids."""
    values, ids = table.topk(min(count, table.shape[-1]), dim=-1)
    return [
        tuple(pair for pair in zip(row_ids, row_values, strict=True) if pair[1] > _IMPOSSIBLE)
        for row_ids, row_values in zip(ids.tolist(), values.tolist(), strict=True)
    ]
