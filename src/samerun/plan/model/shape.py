"""The shape of a dense decoder: what its parameters and activations are counted from.

Three families are modelled: GPT (learned positions, LayerNorm, GELU, biases: GPT-2, GPT-NeoX), Llama (rotary, RMSNorm,
SwiGLU, grouped heads: Llama, Mistral, Qwen2, Qwen3, Phi-3) and Gemma (Llama with wide heads and float32 norms).
Anything else, mixture of experts for one, is refused: a guessed count would look as good as a true one.

Counts agree to the last parameter with the published models (see tests): GPT-2 124,439,808, Llama-2-7B 6,738,415,616,
Llama-3.1-8B 8,030,261,248. For a GPT they equal 12Lh²(1 + 13/12h + (V+s)/12Lh) of arXiv 2104.04473 §5.1 plus
the final norm's 2h.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from samerun.errors import UsageError
from samerun.plan import checks


class Family(Enum):
    """What a block is made of: see the module's first lines."""

    GPT = "gpt"
    LLAMA = "llama"
    GEMMA = "gemma"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder. Sizes are in elements; `max_positions` is 0 when positions are rotary."""

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    max_positions: int = 0
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_norms_per_layer: int = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_size", "vocab_size"):
            checks.whole(name, getattr(self, name), "4096")
        if self.num_heads % self.num_kv_heads:
            checks.divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward part has a gate (three matrices instead of two)."""
        return self.family is not Family.GPT

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of keys (and of values)."""
        return self.num_kv_heads * self.head_size

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of each linear layer of a block: query, key, value, output, then the feed-forward ones."""
        hidden, ffn = self.hidden_size, self.ffn_size
        attention = (
            (hidden, self.query_size),
            (hidden, self.kv_size),
            (hidden, self.kv_size),
            (self.query_size, hidden),
        )
        up = ((hidden, ffn), (hidden, ffn)) if self.is_gated else ((hidden, ffn),)
        return (*attention, *up, (ffn, hidden))

    @property
    def num_matrix_params(self) -> int:
        """Of one block."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def num_vector_params(self) -> int:
        """Norms and biases of one block."""
        hidden = self.hidden_size
        qkv_bias = self.query_size + 2 * self.kv_size
        if self.family is Family.GPT:
            return 2 * self.num_norms_per_layer * hidden + qkv_bias + hidden + self.ffn_size + hidden
        qk_norm = 2 * self.head_size if self.has_qk_norm else 0
        return self.num_norms_per_layer * hidden + (qkv_bias if self.has_qkv_bias else 0) + qk_norm

    @property
    def num_block_params(self) -> int:
        return self.num_matrix_params + self.num_vector_params

    @property
    def num_embedding_params(self) -> int:
        return (self.vocab_size + self.max_positions) * self.hidden_size

    @property
    def num_head_params(self) -> int:
        """Of the output projection; 0 when it is the embedding itself."""
        return 0 if self.is_tied else self.vocab_size * self.hidden_size

    @property
    def num_final_norm_params(self) -> int:
        return (2 if self.family is Family.GPT else 1) * self.hidden_size

    @property
    def num_params(self) -> int:
        ends = self.num_embedding_params + self.num_head_params + self.num_final_norm_params
        return self.num_layers * self.num_block_params + ends


def gpt(*, num_layers: int, hidden_size: int, num_heads: int, vocab_size: int, max_positions: int) -> Shape:
    """A GPT with a feed-forward part of 4h and a tied head, as in the Megatron tables."""
    if hidden_size % num_heads:
        checks.divides("num_heads", num_heads, "hidden_size", hidden_size)
    return Shape(
        family=Family.GPT, num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads,
        num_kv_heads=num_heads, head_size=hidden_size // num_heads, ffn_size=4 * hidden_size,
        vocab_size=vocab_size, max_positions=max_positions, is_tied=True,
    )  # fmt: skip


def check_params(shape: Shape, num_params: int, *, given: str = "--params") -> None:
    """Raises UsageError when a stated parameter count and a shape are more than 5 % apart: one of them is wrong."""
    counted = shape.num_params
    if abs(counted - num_params) > 0.05 * num_params:
        raise UsageError(
            f"{given} {num_params:.4g} and the shape disagree: the shape has {counted:.4g} parameters "
            f"({counted / num_params - 1:+.0%}); drop {given}, or correct the shape"
        )
