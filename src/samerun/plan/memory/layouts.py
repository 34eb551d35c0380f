"""Every layout of a number of ranks that a device size and a global batch allow: (D, TP, PP, micro, K), judged.

Tensor parallelism is tried up to `max_tensor` (a node's links), pipeline stages up to the layers, and one or more
ZeRO stages. Each layout has the bounds of a whole memory plan; those that do not fit are counted, not shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from samerun.errors import UsageError
from samerun.plan import checks
from samerun.plan.memory.plan import PeakBounds, Verdict, judge
from samerun.plan.memory.request import Layout, MemoryRequest, Microbatch
from samerun.plan.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutsRequest:
    """A memory request whose layout and microbatch are open. It needs a shape, a sequence length and a device."""

    memory: MemoryRequest
    num_ranks: int
    global_batch: int
    max_tensor: int = 8
    zero_stages: tuple[int, ...] = (0, 1, 3)

    def __post_init__(self) -> None:
        checks.whole("ranks", self.num_ranks, "--ranks 8")
        checks.whole("global batch", self.global_batch, "--global 64")
        if self.memory.shape is None or not self.memory.batch.sequence_length or self.memory.device is None:
            raise UsageError(
                "layouts need the shape, --seq and --device; write it like "
                "--config config.json --seq 4096 --device 80GB"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """One layout that fits, or that cannot be told."""

    num_replicas: int
    num_tensor: int
    num_pipeline: int
    zero_stage: int
    micro_batch: int
    num_accumulated: int
    """Of the busiest replica."""
    lower_bytes: int
    upper_bytes: int | None
    headroom_bytes: int
    """Device less the upper bound (the lower one when that is unknown); negative when it may not fit."""
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutsPlan:
    """All layouts that are not ruled out; those that fit first, then least parallelism, then largest microbatch."""

    SCHEMA: ClassVar[str] = "samerun.plan.layouts.v1"

    num_ranks: int
    global_batch: int
    choices: tuple[LayoutChoice, ...]
    num_ruled_out: int


def plan_layouts(request: LayoutsRequest) -> LayoutsPlan:
    """Judges every layout. Raises UsageError when the request lacks a shape, a sequence length or a device."""
    found, ruled_out = [], 0
    peaks = PeakBounds()
    for layout, batch in _candidates(request):
        try:
            memory = replace(request.memory, layout=layout, batch=batch)
        except UsageError:  # heads or layers do not divide: this mesh does not exist for this model
            continue
        choice = _choice(memory, peaks.of(memory))
        if choice.verdict is Verdict.DOES_NOT_FIT:
            ruled_out += 1
        else:
            found.append(choice)
    found.sort(key=_preference)
    return LayoutsPlan(
        num_ranks=request.num_ranks, global_batch=request.global_batch, choices=tuple(found), num_ruled_out=ruled_out
    )


def _preference(choice: LayoutChoice) -> tuple[bool, int, int, int]:
    parallel = choice.num_tensor * choice.num_pipeline
    return choice.verdict is not Verdict.FITS, parallel, choice.zero_stage, -choice.micro_batch


def _candidates(request: LayoutsRequest) -> Iterator[tuple[Layout, Microbatch]]:
    for mesh in _meshes(request):
        per_replica = request.global_batch / mesh.num_replicas
        for micro in _powers(int(per_replica)):
            if request.global_batch % micro:
                continue
            accumulated = math.ceil(request.global_batch / micro / mesh.num_replicas)
            batch = Microbatch(
                num_sequences=micro,
                sequence_length=request.memory.batch.sequence_length,
                num_accumulated=accumulated,
            )
            for stage in request.zero_stages if mesh.num_replicas > 1 else (0,):
                layout = Layout(mesh=mesh, zero_stage=stage, is_sequence_parallel=mesh.num_tensor > 1)
                yield layout, batch


def _meshes(request: LayoutsRequest) -> Iterator[Mesh]:
    shape = request.memory.shape
    assert shape is not None
    for tensor in _powers(min(request.max_tensor, request.num_ranks)):
        for pipeline in range(1, min(shape.num_layers, request.num_ranks) + 1):
            if request.num_ranks % (tensor * pipeline) == 0:
                mesh = Mesh(num_ranks=request.num_ranks, num_tensor=tensor, num_pipeline=pipeline)
                if mesh.num_replicas <= request.global_batch:
                    yield mesh


def _powers(limit: int) -> list[int]:
    return [2**power for power in range(max(1, limit).bit_length()) if 2**power <= max(1, limit)]


def _choice(memory: MemoryRequest, peak: tuple[int, int | None]) -> LayoutChoice:
    mesh, batch, (lower, upper) = memory.layout.mesh, memory.batch, peak
    assert memory.device is not None
    device = memory.device.num_bytes
    return LayoutChoice(
        num_replicas=mesh.num_replicas,
        num_tensor=mesh.num_tensor,
        num_pipeline=mesh.num_pipeline,
        zero_stage=memory.layout.zero_stage,
        micro_batch=batch.num_sequences,
        num_accumulated=batch.num_accumulated,
        lower_bytes=lower,
        upper_bytes=upper,
        headroom_bytes=device - (lower if upper is None else upper),
        verdict=judge(lower, upper, device),
    )
