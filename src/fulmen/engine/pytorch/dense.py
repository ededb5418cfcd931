"""The forward pass of Llama, Qwen2 and Qwen3, written for a CPU.

The same arithmetic as Hugging Face's modules, which serve every other family and device, at a
third of the operations: one product for queries, keys and values, one for gate and up, residuals
added inside the products, and weights packed once for oneDNN, whose float32 product runs about
twice as fast as MKL's on AMD and whose rows do not depend on how many others there are.

The packed copies are taken when the object is made and at `refresh()`. So weights may change only
inside `LocalEngine.updating`, which is where changes belong anyway; and in a model with several
adapters only these.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from fulmen.engine.adapted import Rows, is_adapted
from fulmen.engine.adapters import adapter_names
from fulmen.engine.pytorch.attention import CacheView
from fulmen.engine.pytorch.products import Product

_FAMILIES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
"""Those whose angles depend on the position alone, so that they can be tabled."""
_MAX_WEIGHT_BYTES = 2 << 30
"""Above it a second copy of the weights costs more than it gains."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one forward pass computes of sequences that have equally many new tokens, or padding."""

    ids: Tensor
    """(P, C) int64."""
    view: CacheView
    """Where they stand, and what they see."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's packed products, and its small weights as they live in the model."""

    attention_norm: Tensor
    query_key_value: Product
    query_key_norm: Tensor | None
    """(Hq + H, D) where queries and keys are normalised per head, as in Qwen3."""
    output: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product


class DenseForward:
    """Hidden states and logits of a model that `supports` accepts."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self._model: Any = model
        self._heads: int = config.num_attention_heads
        self._shared: int = config.num_key_value_heads
        self._width: int = self._model.get_decoder().layers[0].self_attn.head_dim
        self._eps: float = config.rms_norm_eps
        self._cos = self._sin = torch.empty(0, self._width)
        self._adapters = adapter_names(model)
        self._products: list[Product] = []
        self._pack_all()

    def refresh(self) -> None:
        """Take the weights of this moment: the model's, or of several adapters theirs."""
        if len(self._adapters) < 2:
            self._pack_all()
            return
        for product in self._products:
            product.refresh()

    def hidden(self, parts: Sequence[Part], rows: Rows | None = None) -> list[Tensor]:
        """Hidden states (P, C, E) of each part, writing keys and values into the cache.

        All parts are one pass, but for attention, and filled up with tokens that nobody sees.
        `rows` says which of several adapters each token has, one part after the other.
        """
        decoder = self._model.get_decoder()
        sizes = [part.ids.numel() for part in parts]
        count = _few_counts(sum(sizes))
        more = [torch.zeros(count - sum(sizes), dtype=torch.int64)]
        table = None if rows is None else self._table(replace(rows, tokens=count))
        places = torch.cat([part.view.positions.reshape(-1) for part in parts] + more)
        cos, sin = self._angles(places, max(part.view.length for part in parts))
        ids = torch.cat([part.ids.reshape(-1) for part in parts] + more)
        x = functional.embedding(ids, decoder.embed_tokens.weight.detach())  # (N, E)
        for number, layer in enumerate(self._layers):
            joined = layer.query_key_value(self._norm(x, layer.attention_norm), table)
            mixed = self._attend(number, layer, joined, cos, sin, parts)
            x = layer.output.added_to(x, mixed, table)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm), table).chunk(2, dim=-1)
            x = layer.down.added_to(x, functional.silu(gate) * up, table)
        x = self._norm(x, decoder.norm.weight.detach())
        pairs = zip(x[: sum(sizes)].split(sizes), parts, strict=True)
        return [own.view(*part.ids.shape, -1) for own, part in pairs]

    def project(self, hidden: Tensor, rows: Rows | None = None) -> Tensor:
        """(P, E) hidden states to (P, V) logits."""
        return self._head(hidden, self._table(rows))

    def _attend(
        self,
        number: int,
        layer: _Layer,
        joined: Tensor,
        cos: Tensor,
        sin: Tensor,
        parts: Sequence[Part],
    ) -> Tensor:
        """(N, (Hq + 2 H) · D) queries, keys and values to (N, Hq · D) mixed values."""
        both = self._heads + self._shared
        heads = joined.view(len(joined), both + self._shared, self._width)
        query_key, value = heads[:, :both], heads[:, both:]
        if layer.query_key_norm is not None:
            query_key = functional.rms_norm(query_key, (self._width,), None, self._eps)
            query_key = query_key * layer.query_key_norm
        # Half a turn of the head's width, with the sign in the table, is `rotate_half`.
        turned = query_key.roll(self._width // 2, dims=-1)
        query_key = torch.addcmul(query_key * cos, turned, sin)
        sizes = [part.ids.numel() for part in parts]
        if sizes == [len(joined)]:
            return self._mix(number, query_key, value, parts[0].view)
        all_sizes = [*sizes, len(joined) - sum(sizes)]
        # Not strict: the last piece is of no part.
        own = zip(query_key.split(all_sizes), value.split(all_sizes), parts, strict=False)
        mixed = [self._mix(number, qk, v, part.view) for qk, v, part in own]
        return torch.cat([*mixed, joined.new_zeros(all_sizes[-1], mixed[0].shape[-1])])

    def _mix(self, number: int, query_key: Tensor, value: Tensor, view: CacheView) -> Tensor:
        """One part's (N, Hq + H, D) and (N, H, D) to (N, Hq · D) mixed values."""
        count, columns = view.positions.shape
        split = query_key.view(count, columns, -1, self._width).transpose(1, 2)
        query, key = split[:, : self._heads], split[:, self._heads :]
        value = value.view(count, columns, self._shared, self._width).transpose(1, 2)
        keys, values = view.write(number, key, value)
        scale = self._width**-0.5
        if columns == 1:
            return self._decode(query, keys, values, view, scale)
        mixed = functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=view.bias(None, query.dtype),
            scale=scale,
            enable_gqa=True,
        )
        return mixed.transpose(1, 2).reshape(count * columns, -1)

    def _decode(
        self, query: Tensor, keys: Tensor, values: Tensor, view: CacheView, scale: float
    ) -> Tensor:
        """(P, Hq, 1, D) queries to (P, Hq · D): queries that share a key head are one product."""
        count, _, length, width = keys.shape
        grouped = query.reshape(count * self._shared, -1, width)
        bias = view.bias(None, query.dtype).view(count, 1, 1, length)
        bias = bias.expand(count, self._shared, grouped.shape[1], length).reshape(
            count * self._shared, grouped.shape[1], length
        )
        scores = torch.baddbmm(bias, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(count, -1)

    def _angles(self, places: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of some positions, both (N, 1, D)."""
        if length > len(self._cos):
            every = torch.arange(2 * length)[None]
            cos, sin = self._model.get_decoder().rotary_emb(self._cos, every)
            half = self._width // 2
            self._cos = cos[0]
            self._sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return self._cos[places][:, None], self._sin[places][:, None]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _pack_all(self) -> None:
        self._products.clear()
        self._head = self._product(self._model.get_output_embeddings())
        self._layers = [self._pack(layer) for layer in self._model.get_decoder().layers]

    def _pack(self, layer: Any) -> _Layer:  # noqa: ANN401 - a decoder layer of one of the families
        attention, mlp = layer.self_attn, layer.mlp
        norm = None
        if hasattr(attention, "q_norm"):
            norm = torch.cat(
                (
                    attention.q_norm.weight.detach().expand(self._heads, -1),
                    attention.k_norm.weight.detach().expand(self._shared, -1),
                )
            )
        return _Layer(
            attention_norm=layer.input_layernorm.weight.detach(),
            query_key_value=self._product(attention.q_proj, attention.k_proj, attention.v_proj),
            query_key_norm=norm,
            output=self._product(attention.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=self._product(mlp.gate_proj, mlp.up_proj),
            down=self._product(mlp.down_proj),
        )

    def _product(self, *layers: Any) -> Product:  # noqa: ANN401 - linear layers, PEFT's among them
        self._products.append(Product(layers, self._adapters))
        return self._products[-1]

    def _table(self, rows: Rows | None) -> Tensor | None:
        return None if rows is None else rows.table(self._adapters)


def _few_counts(count: int) -> int:
    """The next number of tokens that passes are filled up to: sixteen between n and 2 n.

    oneDNN prepares a product for every shape anew, and keeps a thousand of them.

    >>> [_few_counts(n) for n in (1, 31, 33, 100, 500)]
    [1, 31, 34, 100, 512]
    """
    unit = 1 << max(0, count.bit_length() - 5)
    return -(-count // unit) * unit


def supports(model: PreTrainedModel) -> bool:
    """Whether `DenseForward` computes this model, and is worth its second copy of the weights."""
    if type(model).__name__ not in _FAMILIES:
        return False
    config: Any = model.config
    parameters = list(model.parameters())
    linears = [m for m in model.get_decoder().modules() if "Linear" in type(m).__name__]
    return (
        all(p.device.type == "cpu" and p.dtype == torch.float32 for p in parameters)
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and sum(p.numel() * 4 for p in parameters) <= _MAX_WEIGHT_BYTES
        and config.hidden_act == "silu"
        and (config.rope_parameters or {}).get("rope_type", "default") in _FIXED_ROPES
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and all(type(m) is nn.Linear or _merges(m) for m in linears)
        and _biases_agree(model)
    )


def _merges(layer: Any) -> bool:  # noqa: ANN401 - any layer
    """Whether a layer is a plain one with a LoRA beside it, which can be added to its weight."""
    return is_adapted(layer) and type(layer.base_layer) is nn.Linear


def _biases_agree(model: Any) -> bool:  # noqa: ANN401 - a model of one of the families
    """Products are joined only where all have a bias or none has."""
    attention = model.get_decoder().layers[0].self_attn
    joined = (attention.q_proj, attention.k_proj, attention.v_proj)
    return len({linear.bias is None for linear in joined}) == 1
