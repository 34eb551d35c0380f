"""The shape of a dense decoder read from the names and shapes of its weights.

Names are those of transformers' Llama family (Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma), GPT-2, GPT-NeoX, of Meta's
Llama and of nanoGPT. A reading counts only when the shape it gives has exactly as many parameters as the weights: a
model with anything else in it (experts, a vision tower, one more norm) is refused, not guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from samerun.errors import UsageError
from samerun.plan import checks
from samerun.plan.model.shape import Family, Shape

_LAYER: Final = re.compile(r"(?:^|.*[./])(?:layers|h|blocks)\.(\d+)\.(.+)")

_EMBEDDING: Final = ("embed_tokens.weight", "wte.weight", "tok_embeddings.weight", "embed_in.weight")
_POSITIONS: Final = ("wpe.weight",)
_HEAD: Final = ("lm_head.weight", "embed_out.weight", "output.weight")
_QUERY: Final = ("q_proj.weight", "wq.weight")
_KEY: Final = ("k_proj.weight", "wk.weight")
_FUSED: Final = ("c_attn.weight", "query_key_value.weight", "qkv_proj.weight")
_GATE: Final = ("gate_proj.weight", "w1.weight")
_FUSED_GATE: Final = ("gate_up_proj.weight",)
_UP: Final = ("up_proj.weight", "w3.weight", "c_fc.weight", "dense_h_to_4h.weight")
_QUERY_NORM: Final = ("q_norm.weight",)
_QUERY_BIAS: Final = ("q_proj.bias",)

_BY_HAND: Final = "give --config config.json or the shape (--layers 32 --hidden 4096 --heads 32 --vocab 128256 …)"

Sizes = Mapping[str, tuple[int, ...]]


def num_elements(tensors: Sizes) -> int:
    """Of all of them together."""
    return sum(math.prod(size) for size in tensors.values())


def shape_of_tensors(
    tensors: Sizes, *, num_heads: int | None = None, family: Family = Family.LLAMA, where: str = "weights"
) -> Shape:
    """The decoder that holds these weights; tied ones are listed once.

    Tensors do not show how many heads share a projection: `num_heads` is needed unless the heads have norms of their
    own (Qwen3). Gemma's weights look like Llama's: say `family`. Raises UsageError for what is not modelled.
    """
    layer, outer, num_layers = _first_layer(tensors, where)
    embedding = _find(outer, _EMBEDDING)
    if embedding is None or len(embedding) != 2:
        raise UsageError(f"{where}: no token embedding by a known name ({', '.join(_EMBEDDING)}); {_BY_HAND}")
    vocab, hidden = embedding
    positions = _find(outer, _POSITIONS)
    query, kv = _attention(layer, hidden, where)
    ffn, is_gated = _feed_forward(layer, hidden, where)
    head_size = _head_size(layer, query, num_heads, where)
    shape = Shape(
        family=(Family.GEMMA if family is Family.GEMMA else Family.LLAMA) if is_gated else Family.GPT,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=query // head_size,
        num_kv_heads=max(1, kv // head_size),
        head_size=head_size,
        ffn_size=ffn,
        vocab_size=vocab,
        max_positions=positions[0] if positions else 0,
        is_tied=_find(outer, _HEAD) is None,
        has_qkv_bias=is_gated and _find(layer, _QUERY_BIAS) is not None,
        has_qk_norm=_find(layer, _QUERY_NORM) is not None,
        num_norms_per_layer=_num_norms(layer),
    )
    held = num_elements(tensors)
    if shape.num_params != held:
        raise UsageError(
            f"{where}: holds {held:,} parameters, but the dense decoder that its names describe has "
            f"{shape.num_params:,}: something in it is not modelled; {_BY_HAND}"
        )
    return shape


def _first_layer(tensors: Sizes, where: str) -> tuple[Sizes, Sizes, int]:
    """(tensors of layer 0 by their names in it, tensors outside the layers, number of layers)."""
    layer: dict[str, tuple[int, ...]] = {}
    outer: dict[str, tuple[int, ...]] = {}
    numbers = set()
    for name, size in tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            outer[name] = size
            continue
        numbers.add(int(found[1]))
        if int(found[1]) == 0:
            layer[found[2]] = size
    if numbers != set(range(len(numbers))) or not numbers:
        raise UsageError(f"{where}: no layers by a known name (layers.0, h.0, blocks.0); {_BY_HAND}")
    return layer, outer, len(numbers)


def _find(tensors: Sizes, endings: tuple[str, ...]) -> tuple[int, ...] | None:
    for name, size in tensors.items():
        if any(name == ending or name.endswith("." + ending) for ending in endings):
            return size
    return None


def _width(tensors: Sizes, endings: tuple[str, ...], hidden: int) -> int | None:
    """The other side of a matrix whose one side is `hidden`; linear layers and GPT-2's transposed ones alike."""
    size = _find(tensors, endings)
    if size is None or len(size) != 2 or hidden not in size:
        return None
    return math.prod(size) // hidden


def _attention(layer: Sizes, hidden: int, where: str) -> tuple[int, int]:
    """Widths of the queries, and of the keys."""
    query, key = _width(layer, _QUERY, hidden), _width(layer, _KEY, hidden)
    if query is not None and key is not None:
        return query, key
    fused = _width(layer, _FUSED, hidden)
    if fused is not None and fused >= 3 * hidden:
        return hidden, hidden
    if fused is not None and fused > hidden:  # grouped heads in one matrix: queries are as wide as the model
        return hidden, (fused - hidden) // 2
    raise UsageError(f"{where}: no attention by a known name ({', '.join((*_QUERY, *_FUSED))}); {_BY_HAND}")


def _feed_forward(layer: Sizes, hidden: int, where: str) -> tuple[int, bool]:
    """(width, whether it has a gate)."""
    up, fused = _width(layer, _UP, hidden), _width(layer, _FUSED_GATE, hidden)
    if fused is not None:
        return fused // 2, True
    if up is not None:
        return up, _find(layer, _GATE) is not None
    raise UsageError(f"{where}: no feed-forward part by a known name ({', '.join((*_UP, *_FUSED_GATE))}); {_BY_HAND}")


def _head_size(layer: Sizes, query: int, num_heads: int | None, where: str) -> int:
    norm = _find(layer, _QUERY_NORM)
    if num_heads is None:
        if norm is None or len(norm) != 1:
            raise UsageError(
                f"{where}: weights do not show how many heads share {query} query features; add --heads, like --heads "
                f"{max(1, query // 128)}"
            )
        return norm[0]
    checks.divides("--heads", num_heads, "query features", query)
    return query // num_heads


def _num_norms(layer: Sizes) -> int:
    names = [name for name, size in layer.items() if len(size) == 1 and name.endswith(".weight")]
    return max(1, len([name for name in names if not name.endswith(("q_norm.weight", "k_norm.weight"))]))
