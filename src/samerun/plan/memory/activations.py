"""Terms that live inside a window: saved activations, a recomputed segment, logits.

Per token and layer, in bytes for 2-byte activations (a fp32 run doubles them), with h hidden, q = heads·head size,
kv = kv heads·head size, f feed-forward size:

    upper, GPT     34h (+ 5·heads·s without fused attention); with t tensor ranks 10h + 24h/t, or 34h/t with sequence
                   parallelism: Korthikanti et al., arXiv 2205.05198 §4, written out for other f: 18h + 16h·f/4h
    upper, Llama   eager RMSNorm keeps an fp32 copy, a normalized copy and its output (8h each, 10h in Gemma); q; k and
                   v repeated to all heads; output twice; 4 tensors of f; the residual stream 4h. It lies 0 to 8 % over
                   the hidden-state copies measured by ml-engineering: Llama-3.1-8B 28, Qwen3-4B 38, Gemma-1.1-2B 48
    lower          what no compiler recomputes cheaply: inputs of norms, outputs of matrix products

Fused attention (flash, memory-efficient SDPA) keeps no s² term, so `selective` recompute saves nothing there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from samerun.plan.memory.counts import RankCounts, adapted_matrices
from samerun.plan.memory.published import interleaving_factor, sqrt_segments
from samerun.plan.memory.request import (
    NUMBER_BYTES,
    Attention,
    Loss,
    MemoryRequest,
    Method,
    Recompute,
)
from samerun.plan.memory.states import unknown_term
from samerun.plan.memory.term import WINDOW, Phase, Tag, Term, engineering
from samerun.plan.model.shape import Family, Shape

KORTHIKANTI: Final = "Korthikanti et al., arXiv 2205.05198 §4"
CHEN: Final = "Chen et al., arXiv 1604.06174 §4"
COPIES: Final = "saved tensors counted; copies measured in ml-engineering"
LOGITS: Final = "PyTorch cross-entropy: fp32 log-probabilities are saved"

_BF16_BYTES: Final = 2
_MATH_LOWER: Final = 2
"""Softmax output, in bytes per score."""
_MATH_UPPER_GPT: Final = 5
"""Softmax output, dropout mask, dropout output."""
_MATH_UPPER_EAGER: Final = 13
"""Scores, fp32 softmax, its 2-byte cast, dropout mask and output: eager attention of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bytes, at least and at most."""

    lower: float
    upper: float

    def times(self, factor: float) -> Bounds:
        return Bounds(lower=self.lower * factor, upper=self.upper * factor)

    def plus(self, other: Bounds) -> Bounds:
        return Bounds(lower=self.lower + other.lower, upper=self.upper + other.upper)


def activation_terms(request: MemoryRequest, counts: RankCounts, *, is_last_stage: bool) -> list[Term]:
    """Saved activations, the working set of one segment and, on the last stage, the logits."""
    if request.shape is None or not request.batch.sequence_length:
        needs = "the shape and --seq" if request.shape is None else "--seq"
        return [
            unknown_term("activations", f"needs {needs}: saved tensors per layer", KORTHIKANTI, WINDOW),
            unknown_term("logits", f"needs {needs}: sequence × vocabulary", LOGITS, (Phase.FORWARD,)),
        ]
    terms = [_saved(request, counts, is_last_stage=is_last_stage), _working_set(request, counts)]
    if is_last_stage:
        terms.append(_logits(request))
    return terms


def num_tokens(request: MemoryRequest) -> int:
    """Of one microbatch on one rank: micro · sequence / context ranks."""
    batch = request.batch
    return batch.num_sequences * batch.sequence_length // request.layout.mesh.num_context


def layer_bounds(request: MemoryRequest, *, with_scores: bool = True) -> Bounds:
    """Saved activations of one layer on one rank, all of them kept; `with_scores=False` leaves the s² term out."""
    shape = request.shape
    assert shape is not None
    per_token = _llama_bytes(request, shape) if shape.is_gated else _gpt_bytes(request, shape)
    total = per_token.times(num_tokens(request))
    if with_scores and request.activations.attention is Attention.MATH:
        total = total.plus(_score_bytes(request, shape))
    if request.method is not Method.FULL:
        total = total.plus(_adapter_bytes(request, shape))
    return total.times(NUMBER_BYTES[request.precision].activation / _BF16_BYTES)


def _divisors(request: MemoryRequest) -> tuple[int, int]:
    """(what divides matrix outputs, what divides norms and residuals) over the tensor ranks."""
    tensor = request.layout.mesh.num_tensor
    return tensor, tensor if request.layout.is_sequence_parallel else 1


def _gpt_bytes(request: MemoryRequest, shape: Shape) -> Bounds:
    inner, outer = _divisors(request)
    hidden, query, ffn = shape.hidden_size, shape.query_size, shape.ffn_size
    replicated = 10 * hidden / outer
    split = (6 * query + 2 * query + 4 * ffn) / inner  # q, k, v, attention output, GELU input and output
    kept = (6 * query + 2 * query + 2 * ffn) / inner + 4 * hidden / outer
    statistics = 4 * shape.num_heads / inner if request.activations.attention is Attention.FLASH else 0
    norms = 16 / outer  # mean and reciprocal deviation of two norms, fp32
    return Bounds(lower=kept, upper=replicated + split + statistics + norms)


def _llama_bytes(request: MemoryRequest, shape: Shape) -> Bounds:
    inner, outer = _divisors(request)
    hidden, query, kv, ffn = shape.hidden_size, shape.query_size, shape.kv_size, shape.ffn_size
    norm = 10 if shape.family is Family.GEMMA else 8
    norms = shape.num_norms_per_layer * norm * hidden / outer
    qk_norm = 6 * (query + kv) / inner if shape.has_qk_norm else 0
    attention = (2 * query + 4 * query + 2 * 2 * query) / inner + 4 * shape.num_heads / inner
    upper = norms + qk_norm + attention + 4 * 2 * ffn / inner + 4 * hidden
    kept = 2 * 2 * hidden / outer + (2 * query + 4 * kv + 2 * query + 2 * 2 * ffn) / inner
    return Bounds(lower=kept, upper=upper)


def _score_bytes(request: MemoryRequest, shape: Shape) -> Bounds:
    """heads · s² · b per kept tensor of scores, over the tensor and context ranks."""
    scores = shape.num_heads * request.batch.sequence_length * num_tokens(request) / request.layout.mesh.num_tensor
    upper = _MATH_UPPER_GPT if shape.family is Family.GPT else _MATH_UPPER_EAGER
    return Bounds(lower=_MATH_LOWER * scores, upper=upper * scores)


def _adapter_bytes(request: MemoryRequest, shape: Shape) -> Bounds:
    """Each adapter keeps, at most, an fp32 input, its dropout mask and output (9 B an element) and r values twice."""
    rank = request.adapter.rank
    each = sum(9 * rows + 8 * rank for rows, _ in adapted_matrices(shape, request.adapter))
    return Bounds(lower=0, upper=each * num_tokens(request))


def _boundary_bytes(request: MemoryRequest) -> float:
    """A segment's input: the residual stream, 2sbh for 2-byte activations."""
    assert request.shape is not None
    _, outer = _divisors(request)
    each = NUMBER_BYTES[request.precision].activation
    return each * num_tokens(request) * request.shape.hidden_size / outer


def segment_layers(request: MemoryRequest, num_layers: int) -> int:
    """Layers recomputed at a time: 1 under `full`, k under `every-k`, L/√L under `sqrt`; 0 without segments."""
    mode = request.activations.recompute
    if mode is Recompute.FULL:
        return 1
    if mode is Recompute.EVERY_K:
        return min(request.activations.segment_layers, num_layers)
    if mode is Recompute.SQRT:
        return math.ceil(num_layers / sqrt_segments(num_layers))
    return 0


def _in_flight(request: MemoryRequest, *, is_last_stage: bool) -> tuple[float, str]:
    """Microbatches whose activations a stage holds at once under 1F1B: p on the first stage, 1 on the last."""
    mesh = request.layout.mesh
    if mesh.num_pipeline == 1 or is_last_stage:
        return 1.0, ""
    held = min(mesh.num_pipeline, request.batch.num_accumulated)
    factor = interleaving_factor(mesh.num_pipeline, request.layout.num_interleaved)
    return held * factor, f" × {held * factor:.3g} in flight"


def _saved(request: MemoryRequest, counts: RankCounts, *, is_last_stage: bool) -> Term:
    flight, said = _in_flight(request, is_last_stage=is_last_stage)
    layers, segment = counts.num_layers, segment_layers(request, counts.num_layers)
    if segment:
        boundaries = math.ceil(layers / segment)
        total = Bounds(lower=_boundary_bytes(request), upper=_boundary_bytes(request)).times(boundaries * flight)
        formula, source = f"{boundaries} segment inputs × 2·s·b·h{said}", CHEN
    else:
        selective = request.activations.recompute is Recompute.SELECTIVE
        total = layer_bounds(request, with_scores=not selective).times(layers * flight)
        formula = f"{layers} layers × {_copies(total, request, layers * flight)}{said}"
        source = COPIES if request.shape is not None and request.shape.is_gated else KORTHIKANTI
    return Term(
        name="saved activations" if not segment else "saved segment inputs",
        lower_bytes=math.floor(total.lower),
        upper_bytes=math.ceil(total.upper + _embedding_bytes(request)),
        tag=Tag.BOUND,
        formula=formula,
        source=source,
        phases=WINDOW,
        certain_phases=WINDOW if segment else (Phase.FORWARD,),
    )


def _embedding_bytes(request: MemoryRequest) -> float:
    """Token ids (8 B), dropout mask of the embedding, the last norm's input and statistics."""
    assert request.shape is not None
    each = NUMBER_BYTES[request.precision].activation
    return num_tokens(request) * (16 + request.shape.hidden_size * (1 + 5 * each))


def _copies(total: Bounds, request: MemoryRequest, num_layers: float) -> str:
    """The sum as hidden-state copies, the unit in which measurements are published."""
    one = _boundary_bytes(request) * num_layers
    return f"{total.lower / one:.3g}–{total.upper / one:.3g} copies of s·b·h"


def _working_set(request: MemoryRequest, counts: RankCounts) -> Term:
    """One segment, recomputed, and the gradients that flow through one layer (at most its activations again)."""
    segment = segment_layers(request, counts.num_layers)
    layer = layer_bounds(request)
    lower, upper = segment * layer.lower, (segment + 1) * layer.upper
    formula = f"{segment} layers recomputed + gradients of one" if segment else "activation gradients of one layer"
    if request.activations.recompute is Recompute.SELECTIVE:
        lower, formula = 0.0, "attention of one layer recomputed + its gradients"
        upper = 2 * layer.upper
    return Term(
        name="working set of backward",
        lower_bytes=math.floor(lower),
        upper_bytes=math.ceil(upper),
        tag=Tag.BOUND,
        formula=formula,
        source=CHEN if segment else KORTHIKANTI,
        phases=(Phase.BACKWARD,),
    )


def _logits(request: MemoryRequest) -> Term:
    """Eager cross-entropy keeps fp32 log-probabilities; at most logits, an fp32 copy, those, two gradients: 16 B."""
    assert request.shape is not None
    tokens = num_tokens(request)
    number = tokens * math.ceil(request.shape.vocab_size / request.layout.mesh.num_tensor)
    if request.activations.loss is Loss.FUSED:
        lower, upper, formula = 0, 2 * tokens * request.shape.hidden_size * 4, "fused: hidden-sized, no logits kept"
    else:
        lower, upper, formula = 4 * number, 16 * number, f"{engineering(number)} logits × 4–16 B"
    return Term(
        name="logits and loss",
        lower_bytes=lower,
        upper_bytes=upper,
        tag=Tag.BOUND,
        formula=formula,
        source=LOGITS,
        phases=(Phase.FORWARD, Phase.BACKWARD),
        certain_phases=(Phase.FORWARD,),
    )
