"""Terms that hold the model: weights, quantization constants, gradients, masters and moments, adapters.

Sources: ZeRO (arXiv 1910.02054 §3.1, §5) for bytes per parameter and what each stage shards; QLoRA (arXiv 2305.14314
§3) for the base; Dettmers et al. (arXiv 2110.02861) for 8-bit moments. Padding to equal shards adds less than one
element per tensor and rank, and is left out.
"""

from __future__ import annotations

import math
from typing import Final

from samerun.plan.memory.counts import RankCounts
from samerun.plan.memory.published import nf4_bits_per_param
from samerun.plan.memory.request import (
    NUMBER_BYTES,
    MemoryRequest,
    Method,
    Optimizer,
    Precision,
    Quantization,
)
from samerun.plan.memory.term import ALWAYS, Phase, Tag, Term, engineering

ZERO: Final = "ZeRO, arXiv 1910.02054 §3.1, §5"
QLORA: Final = "QLoRA, arXiv 2305.14314 §3"
LORA: Final = "LoRA, arXiv 2106.09685 §4.1"
EIGHT_BIT: Final = "8-bit optimizers, arXiv 2110.02861 §2; bitsandbytes block sizes 256–2048"

_IDEAL_BITS: Final = 4
_MOMENTS: Final[dict[Optimizer, int]] = {Optimizer.SGD: 0, Optimizer.MOMENTUM: 1, Optimizer.ADAMW: 2}
_GRADIENTS: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)


def state_terms(request: MemoryRequest, counts: RankCounts) -> list[Term]:
    """The resident state of one rank, in the order weights → gradients → optimizer."""
    if request.method is Method.FULL:
        return [
            _sharded(request, counts, "weights", counts.num_base, _weight_bytes(request), at_stage=3),
            *_trained_terms(request, counts, "", counts.num_base),
        ]
    adapters = [_adapter_weights(request, counts), *_trained_terms(request, counts, "adapter ", counts.num_adapter)]
    return [*_frozen_base(request, counts), *adapters]


def _weight_bytes(request: MemoryRequest) -> int:
    return NUMBER_BYTES[request.precision].weight


def _shards(request: MemoryRequest, at_stage: int) -> int:
    return request.layout.num_shards if request.layout.zero_stage >= at_stage else 1


def _sharded(
    request: MemoryRequest, counts: RankCounts, name: str, number: int, each: float, at_stage: int
) -> Term:  # fmt: skip
    shards = _shards(request, at_stage)
    size = math.ceil(number * each / shards)
    divided = f" / {shards}" if shards > 1 else ""
    return Term(
        name=name,
        lower_bytes=size,
        upper_bytes=size if counts.is_certain else None,
        tag=Tag.EXACT if counts.is_certain else Tag.UNKNOWN,
        formula=f"{engineering(number)} × {each:g} B{divided}",
        source=ZERO,
    )


def _trained_terms(request: MemoryRequest, counts: RankCounts, prefix: str, number: int) -> list[Term]:
    if prefix and request.shape is None:
        return [_unknown(f"{prefix}gradients and optimizer", "needs the shape: r(in + out) per matrix", LORA)]
    each = NUMBER_BYTES[request.precision]
    terms = [_gradients(request, counts, prefix, number)]
    if each.master:
        terms.append(_sharded(request, counts, f"{prefix}fp32 master weights", number, each.master, at_stage=1))
    if request.optimizer is Optimizer.ADAMW_8BIT:
        terms.append(_eight_bit_moments(request, counts, prefix, number))
    elif _MOMENTS[request.optimizer]:
        moments = _MOMENTS[request.optimizer] * each.moment
        terms.append(_sharded(request, counts, f"{prefix}optimizer moments", number, moments, at_stage=1))
    return terms


def _gradients(request: MemoryRequest, counts: RankCounts, prefix: str, number: int) -> Term:
    """Complete at the step. During forward they are alive for sure only when a window has several microbatches."""
    term = _sharded(request, counts, f"{prefix}gradients", number, NUMBER_BYTES[request.precision].grad, at_stage=2)
    sure = _GRADIENTS if request.batch.num_accumulated > 1 else (Phase.STEP,)
    return Term(
        name=term.name, lower_bytes=term.lower_bytes, upper_bytes=term.upper_bytes, tag=term.tag,
        formula=term.formula, source=term.source, phases=_GRADIENTS, certain_phases=sure,
    )  # fmt: skip


def _eight_bit_moments(request: MemoryRequest, counts: RankCounts, prefix: str, number: int) -> Term:
    """One byte for each of two moments and an fp32 constant per block; tensors under 4096 elements stay fp32."""
    shards = _shards(request, 1)
    small = 0 if request.shape is None else counts.num_layers * request.shape.num_vector_params
    upper = (number * (2 + 2 * 4 / 256) + small * 6) / shards
    return Term(
        name=f"{prefix}optimizer moments (8 bit)",
        lower_bytes=math.ceil(number * 2 / shards),
        upper_bytes=math.ceil(upper) if counts.is_certain else None,
        tag=Tag.BOUND if request.shape is not None else Tag.ESTIMATE,
        formula=f"{engineering(number)} × 2 B + block constants" + (f" / {shards}" if shards > 1 else ""),
        source=EIGHT_BIT,
    )


def _frozen_base(request: MemoryRequest, counts: RankCounts) -> list[Term]:
    if request.method is Method.LORA:
        each = 4 if request.precision is Precision.FP32 else 2
        lower = _sharded(request, counts, "base weights (frozen)", counts.num_base, each, at_stage=3)
        return [lower]
    terms = [_quantized_base(request, counts), _quantization_constants(request, counts)]
    if request.shape is None:
        terms.append(_unknown("higher-precision tensors", "needs the shape: embedding, head, norms at 2–4 B", QLORA))
    else:
        terms.append(_higher_precision(request, counts))
    return terms


def _quantized_base(request: MemoryRequest, counts: RankCounts) -> Term:
    shards = _shards(request, 3)
    size = math.ceil(counts.num_matrix * _IDEAL_BITS / 8 / shards)
    return Term(
        name="base weights (4 bit)",
        lower_bytes=size,
        upper_bytes=size if counts.is_certain else None,
        tag=Tag.EXACT if counts.is_certain else Tag.UNKNOWN,
        formula=f"{engineering(counts.num_matrix)} × 4 bit" + (f" / {shards}" if shards > 1 else ""),
        source=QLORA,
    )


def _quantization_constants(request: MemoryRequest, counts: RankCounts) -> Term:
    """Between none (ideal 4 bit) and one fp32 constant per 64 weights, unless the format is named."""
    low = {
        Quantization.IDEAL_4BIT: 0.0,
        Quantization.NF4: nf4_bits_per_param(is_double=False) - _IDEAL_BITS,
        Quantization.NF4_DOUBLE: nf4_bits_per_param(is_double=True) - _IDEAL_BITS,
    }[request.quantization]
    is_named = request.quantization is not Quantization.IDEAL_4BIT
    high = low if is_named else nf4_bits_per_param(is_double=False) - _IDEAL_BITS
    number = counts.num_matrix / _shards(request, 3)
    bits = f"{low:.3g}" if is_named else f"0–{high:.3g}"
    return Term(
        name="quantization constants",
        lower_bytes=math.ceil(number * low / 8),
        upper_bytes=math.ceil(number * high / 8) if counts.is_certain else None,
        tag=(Tag.EXACT if is_named else Tag.BOUND) if counts.is_certain else Tag.UNKNOWN,
        formula=f"{engineering(number)} × {bits} bit",
        source=QLORA,
    )


def _higher_precision(request: MemoryRequest, counts: RankCounts) -> Term:
    shards = _shards(request, 3)
    return Term(
        name="higher-precision tensors",
        lower_bytes=math.ceil(counts.num_other * 2 / shards),
        upper_bytes=math.ceil(counts.num_other * 4 / shards),
        tag=Tag.BOUND,
        formula=f"{engineering(counts.num_other)} × 2–4 B (embedding, head, norms)",
        source=QLORA,
    )


def _adapter_weights(request: MemoryRequest, counts: RankCounts) -> Term:
    if request.shape is None:
        return _unknown("adapter weights", "needs the shape: r(in + out) per matrix", LORA)
    term = _sharded(request, counts, "adapter weights", counts.num_adapter, _weight_bytes(request), at_stage=3)
    return Term(
        name=term.name, lower_bytes=term.lower_bytes, upper_bytes=term.upper_bytes, tag=term.tag,
        formula=f"r {request.adapter.rank}: {term.formula}", source=LORA,
    )  # fmt: skip


def _unknown(name: str, formula: str, source: str, phases: tuple[Phase, ...] = ALWAYS) -> Term:
    return Term(
        name=name, lower_bytes=0, upper_bytes=None, tag=Tag.UNKNOWN, formula=formula, source=source, phases=phases
    )


def unknown_term(name: str, formula: str, source: str, phases: tuple[Phase, ...]) -> Term:
    """A term that exists but cannot be counted from what was given: at least nothing, at most unknown."""
    return _unknown(name, formula, source, phases)
