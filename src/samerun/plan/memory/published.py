"""Published formulas as published, for comparison and as building blocks. All sizes in bytes, 2-byte activations.

ZeRO          arXiv 1910.02054 §5 and figure 1: 2 (weights), 2 (gradients) and K = 12 (Adam) bytes per parameter
Korthikanti   arXiv 2205.05198 §4, table 2: activations of one transformer layer
QLoRA         arXiv 2305.14314 §3: NF4 with block 64, double quantization with block 256
rule          "about 12·B·L·d floats" per layer, the rule of thumb; 2-byte floats
"""

from __future__ import annotations

import math

from samerun.errors import UsageError


def zero_state_bytes(num_params: float, num_shards: int, stage: int) -> float:
    """Weights, gradients and Adam state of one rank: 16, 4 + 12/N, 2 + 14/N, 16/N bytes per parameter."""
    per_param = (16.0, 4 + 12 / num_shards, 2 + 14 / num_shards, 16 / num_shards)
    if not 0 <= stage < len(per_param):
        raise UsageError(f"ZeRO stage {stage} does not exist; write 0, 1, 2 or 3")
    return num_params * per_param[stage]


def korthikanti_layer_bytes(
    *, hidden: int, heads: int, sequence: int, micro: int = 1, tensor: int = 1, sharded_norms: bool = False,
    selective: bool = False,
) -> float:  # fmt: skip
    """Saved activations of one layer: sbh(10 + 24/t + 5as/ht); with sequence parallelism everything is divided by t.

    `selective` recomputes the attention core, which drops the 5as/h term (absent with flash attention in any case).
    """
    scores = 0.0 if selective else 5 * heads * sequence / hidden
    sbh = sequence * micro * hidden
    if sharded_norms:
        return sbh * (34 + scores) / tensor
    return sbh * (10 + (24 + scores) / tensor)


def korthikanti_full_recompute_bytes(*, hidden: int, sequence: int, micro: int = 1) -> int:
    """Only the layer's input is kept: 2sbh."""
    return 2 * sequence * micro * hidden


def interleaving_factor(num_stages: int, num_interleaved: int) -> float:
    """First stage of interleaved 1F1B against plain 1F1B: 1 + (p − 1)/(p·v). 1 when nothing is interleaved."""
    if num_interleaved <= 1:
        return 1.0
    return 1 + (num_stages - 1) / (num_stages * num_interleaved)


def rule_of_thumb_layer_bytes(*, hidden: int, sequence: int, micro: int = 1) -> int:
    """12·B·L·d floats of 2 bytes."""
    return 2 * 12 * micro * sequence * hidden


def nf4_bits_per_param(*, is_double: bool) -> float:
    """4 bits, plus an fp32 constant per 64 weights; double quantization stores it in 8 bits, with one fp32 per 256."""
    return 4 + (8 / 64 + 32 / (64 * 256) if is_double else 32 / 64)


def sqrt_segments(num_layers: int) -> int:
    """Chen et al. (arXiv 1604.06174): about √L segments; 8 at L = 64."""
    return max(1, round(math.sqrt(num_layers)))
