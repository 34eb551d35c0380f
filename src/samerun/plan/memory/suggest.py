"""What to change when a plan does not fit, in order of cost: first what is free, last what changes the training.

Each suggestion is re-evaluated as a whole plan, because saving in one phase may only move the peak to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from samerun.errors import UsageError
from samerun.plan.memory.plan import MemoryPlan, Verdict, plan_memory
from samerun.plan.memory.request import (
    Attention,
    Loss,
    MemoryRequest,
    Method,
    Optimizer,
    Recompute,
)

_Change = Callable[[MemoryRequest], MemoryRequest | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change, what it costs, and the bounds after it."""

    name: str
    option: str
    cost: str
    lower_bytes: int
    upper_bytes: int | None
    verdict: Verdict


def suggest(plan: MemoryPlan) -> tuple[Suggestion, ...]:
    """Single changes that lower a bound, cheapest first; empty when the plan fits or names no device."""
    if plan.verdict in (None, Verdict.FITS):
        return ()
    found = []
    for name, option, cost, change in _CHANGES:
        changed = _changed(plan.request, change)
        if changed is None or not _is_better(changed, plan):
            continue
        assert changed.verdict is not None
        found.append(
            Suggestion(
                name=name,
                option=option.format(request=changed.request),
                cost=cost,
                lower_bytes=changed.lower_bytes,
                upper_bytes=changed.upper_bytes,
                verdict=changed.verdict,
            )
        )
    return tuple(found)


def _changed(request: MemoryRequest, change: _Change) -> MemoryPlan | None:
    """The plan after a change; None when it changes nothing or is impossible for this mesh or method."""
    try:
        asked = change(request)
        return None if asked is None else plan_memory(asked)
    except UsageError:
        return None


def _is_better(changed: MemoryPlan, plan: MemoryPlan) -> bool:
    if changed.lower_bytes < 0.99 * plan.lower_bytes:
        return True
    before, after = plan.upper_bytes, changed.upper_bytes
    return before is not None and after is not None and after < 0.99 * before


def _flash(request: MemoryRequest) -> MemoryRequest | None:
    if request.activations.attention is Attention.MATH:
        return replace(request, activations=replace(request.activations, attention=Attention.FLASH))
    return None


def _fused_loss(request: MemoryRequest) -> MemoryRequest | None:
    if request.activations.loss is Loss.EAGER:
        return replace(request, activations=replace(request.activations, loss=Loss.FUSED))
    return None


def _smaller_micro(request: MemoryRequest) -> MemoryRequest | None:
    batch = request.batch
    if batch.num_sequences > 1:
        accumulated = batch.num_accumulated * batch.num_sequences
        return replace(request, batch=replace(batch, num_sequences=1, num_accumulated=accumulated))
    return None


def _zero(stage: int) -> _Change:
    def change(request: MemoryRequest) -> MemoryRequest | None:
        if request.layout.zero_stage < stage and request.layout.num_shards > 1:
            return replace(request, layout=replace(request.layout, zero_stage=stage))
        return None

    return change


def _recompute(request: MemoryRequest) -> MemoryRequest | None:
    if request.activations.recompute in (Recompute.NONE, Recompute.SELECTIVE):
        return replace(request, activations=replace(request.activations, recompute=Recompute.FULL))
    return None


def _eight_bit(request: MemoryRequest) -> MemoryRequest | None:
    if request.optimizer is Optimizer.ADAMW:
        return replace(request, optimizer=Optimizer.ADAMW_8BIT)
    return None


def _more_devices(request: MemoryRequest) -> MemoryRequest | None:
    """The fewest devices, doubling, on which sharding everything brings the lower bound under the device."""
    for doublings in range(1, 13):
        ranks = request.layout.mesh.num_ranks * 2**doublings
        mesh = replace(request.layout.mesh, num_ranks=ranks)
        wider = replace(request, layout=replace(request.layout, mesh=mesh, zero_stage=3))
        if plan_memory(wider).verdict is not Verdict.DOES_NOT_FIT:
            return wider
    return None


def _method(method: Method) -> _Change:
    def change(request: MemoryRequest) -> MemoryRequest | None:
        order = [Method.FULL, Method.LORA, Method.QLORA]
        if order.index(request.method) < order.index(method):
            return replace(request, method=method)
        return None

    return change


_MICRO = "--micro 1 --accumulate {request.batch.num_accumulated}"

_CHANGES: tuple[tuple[str, str, str, _Change], ...] = (
    ("fused attention", "--attention flash", "nothing: same arithmetic, less traffic", _flash),
    ("smaller microbatch", _MICRO, "more, smaller kernels", _smaller_micro),
    ("fused loss", "--loss fused", "a fused linear-cross-entropy kernel", _fused_loss),
    ("shard the optimizer", "--zero 1", "one more gather a window", _zero(1)),
    ("shard gradients too", "--zero 2", "as ZeRO-1; reduction per microbatch", _zero(2)),
    ("shard everything", "--zero 3", "about 1.5 × the communication of DDP", _zero(3)),
    ("recompute each block", "--recompute full", "about one third more FLOPs (a step is 4 units, not 3)", _recompute),
    ("8-bit optimizer", "--optimizer adamw-8bit", "quantized moments: another trajectory", _eight_bit),
    ("more devices, sharded", "--ranks {request.layout.mesh.num_ranks} --zero 3", "devices", _more_devices),
    ("adapters", "--method lora", "other trainable weights: another experiment", _method(Method.LORA)),
    ("adapters on a 4-bit base", "--method qlora", "as LoRA, on a quantized base", _method(Method.QLORA)),
)  # fmt: skip
