"""Terms that come and go: gathered groups, buckets, cast copies, the optimizer's temporaries, saving, the reserve.

Sources: PyTorch's DDP (gradient buckets copy unless gradient_as_bucket_view), FSDP2 (root group stays gathered from
forward to backward; one group is prefetched), autocast (weights are cast once per forward and cached), foreach AdamW
(one temporary as large as the second moments), bitsandbytes (a matrix is dequantized for its product).
"""

from __future__ import annotations

import math
from typing import Final

from samerun.plan.memory.counts import RankCounts
from samerun.plan.memory.request import NUMBER_BYTES, MemoryRequest, Method, Optimizer, Precision, Save
from samerun.plan.memory.states import unknown_term
from samerun.plan.memory.term import ALWAYS, WINDOW, Phase, Tag, Term, engineering

DDP: Final = "PyTorch DistributedDataParallel, gradient_as_bucket_view"
FSDP: Final = "PyTorch fully_shard: reshard and prefetch rules"
AUTOCAST: Final = "PyTorch autocast: cached weight casts"
FOREACH: Final = "PyTorch AdamW(foreach=True); fused=True needs none"
BITSANDBYTES: Final = "bitsandbytes 4-bit matmul: dequantize, multiply"
SAVING: Final = "torch.distributed.checkpoint staging and full_state_dict"
RUNTIME: Final = "--reserve; a CUDA context alone takes 0.3–0.6 GB"

_FULL_PRECISION_BYTES: Final = 4


def transient_terms(request: MemoryRequest, counts: RankCounts) -> list[Term]:
    """Device memory beside state and activations; only the terms that this request can have."""
    found = [
        _gradient_buckets(request, counts),
        _gathered_groups(request, counts),
        _unsharded_gradients(request, counts),
        _cast_cache(request, counts),
        _dequantized(request, counts),
        _step_temporaries(request, counts),
        _gather_for_save(request, counts),
        _reserve(request),
    ]
    return [term for term in found if term is not None]


def host_terms(request: MemoryRequest, state: list[Term]) -> list[Term]:
    """Host memory of one rank while a checkpoint is written: the save spike that estimates usually leave out."""
    kept = [term for term in state if "gradients" not in term.name and "frozen" not in term.name]
    if request.method is Method.QLORA:
        kept = [term for term in kept if term.name.startswith("adapter")]
    lower = sum(term.lower_bytes for term in kept)
    uppers = [term.upper_bytes for term in kept]
    upper = None if None in uppers else sum(value or 0 for value in uppers)
    if request.save is Save.FULL_GATHER:
        shards = request.layout.num_shards if request.layout.zero_stage else 1
        split = request.layout.mesh.num_tensor * request.layout.mesh.num_pipeline * shards
        return [
            _host("full state gathered on rank 0", lower, _scaled(upper, split), f"at most {split} × the rank's state")
        ]
    if request.save is Save.ASYNC:
        return [_host("pinned staging copy", lower, _scaled(upper, 2), "state × 1, × 2 while two saves overlap")]
    return [_host("write buffers", 0, upper, "at most one copy of the state")]


def _scaled(size: int | None, factor: int) -> int | None:
    return None if size is None else size * factor


def _host(name: str, lower: int, upper: int | None, formula: str) -> Term:
    return Term(
        name=name, lower_bytes=lower, upper_bytes=upper, tag=Tag.UNKNOWN if upper is None else Tag.BOUND,
        formula=formula, source=SAVING, phases=(Phase.SAVE,),
    )  # fmt: skip


def _trained(request: MemoryRequest, counts: RankCounts) -> int:
    return counts.num_base if request.method is Method.FULL else counts.num_adapter


def _at_most(
    name: str, upper: float, formula: str, source: str, phases: tuple[Phase, ...], lower: float = 0
) -> Term:  # fmt: skip
    return Term(
        name=name, lower_bytes=math.floor(lower), upper_bytes=math.ceil(upper), tag=Tag.BOUND, formula=formula,
        source=source, phases=phases,
    )  # fmt: skip


def _gradient_buckets(request: MemoryRequest, counts: RankCounts) -> Term | None:
    if request.layout.num_shards == 1 or request.layout.zero_stage == 3 or not _is_counted(request, counts):
        return None
    size = _trained(request, counts) * NUMBER_BYTES[request.precision].grad
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
    return _at_most("gradient buckets", size, "≤ gradients; 0 with gradient_as_bucket_view", DDP, phases)


def _is_counted(request: MemoryRequest, counts: RankCounts) -> bool:
    return request.method is Method.FULL or request.shape is not None


def _gathered_groups(request: MemoryRequest, counts: RankCounts) -> Term | None:
    """FSDP: at least the largest matrix at work, at most the root group, two blocks and the gradients of both."""
    if request.layout.zero_stage < 3 or request.layout.num_shards == 1:
        return None
    if not counts.num_block:
        return unknown_term("gathered groups", "needs the shape: block at work + prefetch", FSDP, WINDOW)
    each = NUMBER_BYTES[request.precision].activation
    if request.method is Method.QLORA:
        block = counts.num_block / 2
        return _at_most("gathered groups", 2 * block + counts.num_other * 4, "2 quantized blocks + root", FSDP, WINDOW)
    trains = request.method is Method.FULL
    blocks = 2 * counts.num_block * (each + (_FULL_PRECISION_BYTES if trains else 0))
    root = counts.num_other * (each + (_FULL_PRECISION_BYTES if trains else 0))
    formula = f"a matrix to 2 blocks of {engineering(counts.num_block)} × {each} B, root, gradients"
    return _at_most("gathered groups", blocks + root, formula, FSDP, WINDOW, lower=counts.largest_matrix * each)


def _unsharded_gradients(request: MemoryRequest, counts: RankCounts) -> Term | None:
    """One reduction per window: full gradients stay resident over its microbatches."""
    layout = request.layout
    if not layout.is_unsharded_accumulation or layout.zero_stage < 2 or layout.num_shards == 1:
        return None
    number = _trained(request, counts)
    each = NUMBER_BYTES[request.precision].activation
    formula = f"{engineering(number)} × {each}–4 B, one reduction per window"
    upper = number * _FULL_PRECISION_BYTES
    return _at_most("unsharded gradients", upper, formula, FSDP, WINDOW, lower=number * each)


def _cast_cache(request: MemoryRequest, counts: RankCounts) -> Term | None:
    """Autocast keeps a 2-byte copy of each fp32 weight it multiplies with; FSDP casts while gathering instead."""
    if request.precision not in (Precision.BF16, Precision.FP16) or request.layout.zero_stage == 3:
        return None
    if request.method is not Method.FULL:
        return None
    formula = f"≤ {engineering(counts.num_base)} × 2 B; a compiler may cast again instead"
    return _at_most("autocast weight copies", 2 * counts.num_base, formula, AUTOCAST, WINDOW)


def _dequantized(request: MemoryRequest, counts: RankCounts) -> Term | None:
    if request.method is not Method.QLORA:
        return None
    if not counts.largest_matrix:
        return unknown_term("dequantized matrix", "needs the shape: largest matrix × 2 B", BITSANDBYTES, WINDOW)
    size = 2 * counts.largest_matrix
    return _at_most("dequantized matrix", size, f"{engineering(counts.largest_matrix)} × 2 B", BITSANDBYTES, WINDOW)


def _step_temporaries(request: MemoryRequest, counts: RankCounts) -> Term | None:
    if not _is_counted(request, counts) or request.optimizer is Optimizer.SGD:
        return None
    each = NUMBER_BYTES[request.precision]
    cast = _FULL_PRECISION_BYTES if each.master and each.grad < _FULL_PRECISION_BYTES else 0
    shards = request.layout.num_shards if request.layout.zero_stage >= 1 else 1
    size = _trained(request, counts) * (each.moment + cast) / shards
    return _at_most("optimizer temporaries", size, "≤ one moment; 0 when fused", FOREACH, (Phase.STEP,))


def _gather_for_save(request: MemoryRequest, counts: RankCounts) -> Term | None:
    if request.save is not Save.FULL_GATHER or request.layout.zero_stage < 1 or request.layout.num_shards == 1:
        return None
    each = NUMBER_BYTES[request.precision]
    number = _trained(request, counts)
    full = number * (each.weight + each.master + 2 * each.moment)
    formula = "one tensor at a time with offload, the whole state without"
    return _at_most("state gathered on the device", full, formula, SAVING, (Phase.SAVE,), lower=counts.largest_matrix)


def _reserve(request: MemoryRequest) -> Term | None:
    if not request.reserve_bytes:
        return None
    return Term(
        name="context, buffers, fragmentation", lower_bytes=0, upper_bytes=request.reserve_bytes, tag=Tag.ESTIMATE,
        formula="stated reserve", source=RUNTIME, phases=ALWAYS,
    )  # fmt: skip
