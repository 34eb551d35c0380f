"""Shapes read from weights: every naming gives back the shape it was made of; what is not modelled is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.errors import UsageError
from samerun.plan import Family, Shape, gpt, shape_of_tensors

Sizes = dict[str, tuple[int, ...]]


def llama(shape: Shape) -> Sizes:
    """transformers' Llama, Qwen2 (biases), Qwen3 (head norms), Gemma 2 (four norms)."""
    hidden = shape.hidden_size
    found: Sizes = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not shape.is_tied:
        found["lm_head.weight"] = (shape.vocab_size, hidden)
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for part, (rows, columns) in zip(parts, shape.matrices, strict=True):
            found[f"{prefix}{part}_proj.weight"] = (columns, rows)
        for norm in norms[: shape.num_norms_per_layer]:
            found[f"{prefix}{norm}.weight"] = (hidden,)
        if shape.has_qkv_bias:
            for part, size in zip(parts, (shape.query_size, shape.kv_size, shape.kv_size), strict=False):
                found[f"{prefix}{part}_proj.bias"] = (size,)
        if shape.has_qk_norm:
            found |= {f"{prefix}self_attn.{part}_norm.weight": (shape.head_size,) for part in "qk"}
    return found


def phi3(shape: Shape) -> Sizes:
    """One matrix for queries, keys and values, one for gate and up."""
    found = {
        name: size for name, size in llama(shape).items()
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    }  # fmt: skip
    for layer in range(shape.num_layers):
        wide = shape.query_size + 2 * shape.kv_size
        found[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = (wide, shape.hidden_size)
        found[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = (2 * shape.ffn_size, shape.hidden_size)
    return found


def gpt2(shape: Shape) -> Sizes:
    """Transposed matrices, biases everywhere, learned positions, a tied head."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    found: Sizes = {
        "transformer.wte.weight": (shape.vocab_size, hidden),
        "transformer.wpe.weight": (shape.max_positions, hidden),
        "transformer.ln_f.weight": (hidden,),
        "transformer.ln_f.bias": (hidden,),
    }
    for layer in range(shape.num_layers):
        for name, size in (
            ("ln_1.weight", (hidden,)), ("ln_1.bias", (hidden,)), ("ln_2.weight", (hidden,)), ("ln_2.bias", (hidden,)),
            ("attn.c_attn.weight", (hidden, 3 * hidden)), ("attn.c_attn.bias", (3 * hidden,)),
            ("attn.c_proj.weight", (hidden, hidden)), ("attn.c_proj.bias", (hidden,)),
            ("mlp.c_fc.weight", (hidden, ffn)), ("mlp.c_fc.bias", (ffn,)),
            ("mlp.c_proj.weight", (ffn, hidden)), ("mlp.c_proj.bias", (hidden,)),
        ):  # fmt: skip
            found[f"transformer.h.{layer}.{name}"] = size
    return found


@st.composite
def llama_shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 3))
    return Shape(
        family=draw(st.sampled_from((Family.LLAMA, Family.GEMMA))),
        num_layers=draw(st.integers(1, 13)),
        hidden_size=draw(st.integers(5, 64)),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_size=draw(st.integers(1, 16)),
        ffn_size=draw(st.integers(1, 99)),
        vocab_size=draw(st.integers(1, 99)),
        is_tied=draw(st.booleans()),
        has_qkv_bias=draw(st.booleans()),
        has_qk_norm=draw(st.booleans()),
        num_norms_per_layer=draw(st.sampled_from((2, 4))),
    )


@given(llama_shapes())
def test_a_llama_is_read_back(shape: Shape) -> None:
    heads = None if shape.has_qk_norm else shape.num_heads
    assert shape_of_tensors(llama(shape), num_heads=heads, family=shape.family) == shape


LLAMA = Shape(
    family=Family.LLAMA, num_layers=3, hidden_size=96, num_heads=12, num_kv_heads=4, head_size=8, ffn_size=264,
    vocab_size=101,
)  # fmt: skip


@pytest.mark.parametrize("kv_heads", [1, 4, 12])
def test_fused_matrices_are_read_back(kv_heads: int) -> None:
    shape = replace(LLAMA, num_kv_heads=kv_heads)
    assert shape_of_tensors(phi3(shape), num_heads=12) == shape


def test_gpt_2_is_read_back() -> None:
    """The published 124,439,808 parameters, from transposed matrices as transformers keeps them."""
    shape = gpt(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, max_positions=1024)
    read = shape_of_tensors(gpt2(shape), num_heads=12)
    assert read == shape
    assert read.num_params == 124_439_808


META_NAMES = {
    "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
NEOX_NAMES = {
    "transformer.h.": "gpt_neox.layers.", "transformer.wte": "gpt_neox.embed_in", "transformer.ln_f": "gpt_neox.final",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense", "mlp.c_fc": "mlp.dense_h_to_4h", "mlp.c_proj": "mlp.dense_4h_to_h",
}  # fmt: skip


def renamed(tensors: Sizes, names: dict[str, str]) -> Sizes:
    found = {}
    for name, size in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = size
    return found


def test_meta_s_names_of_a_llama() -> None:
    assert shape_of_tensors(renamed(llama(LLAMA), META_NAMES), num_heads=12) == LLAMA


def test_gpt_neox_has_rotary_positions_and_a_head_of_its_own() -> None:
    learned = gpt(num_layers=7, hidden_size=96, num_heads=12, vocab_size=101, max_positions=13)
    shape = replace(learned, max_positions=0, is_tied=False)
    tensors = {name: size for name, size in gpt2(learned).items() if "wpe" not in name}
    tensors = {name: size[::-1] for name, size in renamed(tensors, NEOX_NAMES).items() if "embed_in" not in name}
    tensors |= {"gpt_neox.embed_in.weight": (101, 96), "embed_out.weight": (101, 96)}
    assert shape_of_tensors(tensors, num_heads=12) == shape


def without(ending: str) -> Callable[[Sizes], Sizes]:
    return lambda tensors: {name: size for name, size in tensors.items() if not name.endswith(ending)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors | {"vision_tower.patch.weight": (3, 7)}, "something in it is not modelled"),
        (lambda tensors: tensors | {"model.layers.1.mlp.router.weight": (8, 96)}, "something in it is not modelled"),
        (without("layers.2.mlp.up_proj.weight"), "something in it is not modelled"),
        (without("embed_tokens.weight"), "no token embedding"),
        (without("q_proj.weight"), "no attention"),
        (without("up_proj.weight"), "no feed-forward"),
        (lambda tensors: {"0.weight": (3, 7)}, "no layers"),
        (lambda tensors: {name.replace("layers.1.", "layers.7."): size for name, size in tensors.items()}, "no layers"),
        (lambda tensors: {}, "no layers"),
    ],
)
def test_what_is_not_modelled_is_refused(change: Callable[[Sizes], Sizes], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        shape_of_tensors(change(llama(LLAMA)), num_heads=12, where="runs/sft@u1")
    assert str(refused.value).startswith("runs/sft@u1: ")
    assert "--config config.json" in str(refused.value)


def test_heads_must_be_said_and_divide() -> None:
    with pytest.raises(UsageError, match="add --heads"):
        shape_of_tensors(llama(LLAMA))
    with pytest.raises(UsageError, match="--heads 7 does not divide query features 96"):
        shape_of_tensors(llama(LLAMA), num_heads=7)
