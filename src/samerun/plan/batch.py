"""Batch arithmetic both ways: B = micro · K · D, solved for whichever one is missing.

B counts samples in one update over all replicas, micro what one rank pushes through at once, K the microbatches of
a replica in one window, D the replicas. Context-, tensor- and pipeline-parallel ranks add no samples. When D does
not divide the microbatches, some replicas get one fewer (K is then the larger count), and the gradient is still
that of the token mean. B below micro · D would leave a replica without work and is refused.

Tokens per update: B times the mean length; with independent lengths its spread is √B times theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from samerun.errors import UsageError
from samerun.plan import checks
from samerun.plan.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of supervised tokens per sample. A fixed sequence length has no spread."""

    mean_tokens: float
    deviation_tokens: float = 0.0
    num_measured: int = 0

    def __post_init__(self) -> None:
        checks.positive("mean length", self.mean_tokens, "--seq 4096")
        checks.not_negative("deviation of the length", self.deviation_tokens, "--lengths lengths.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What is known; at most one of the four may be None. `mesh` gives the replicas, or `num_replicas`."""

    global_batch: int | None = None
    micro_batch: int | None = None
    num_accumulated: int | None = None
    num_replicas: int | None = None
    mesh: Mesh | None = None
    lengths: Lengths | None = None

    def __post_init__(self) -> None:
        for name, option in _OPTIONS.items():
            value = getattr(self, name)
            if value is not None:
                checks.whole(option.removeprefix("--"), value, f"{option} 8")
        if self.mesh is not None and self.num_replicas is not None and self.num_replicas != self.mesh.num_replicas:
            raise UsageError(
                f"the mesh {self.mesh} has {self.mesh.num_replicas} replicas, but --replicas says {self.num_replicas}; "
                "drop one of them (expert-parallel and hybrid groups state --replicas without a mesh)"
            )


_OPTIONS = {
    "global_batch": "--global",
    "micro_batch": "--micro",
    "num_accumulated": "--accumulate",
    "num_replicas": "--replicas",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One consistent batch. All counts per update, over all replicas, unless said otherwise."""

    SCHEMA: ClassVar[str] = "samerun.plan.batch.v1"

    solved: str
    """The field that was computed; empty when all were given and agree."""
    global_batch: int
    micro_batch: int
    num_accumulated: int
    """Microbatches of the busiest replica in one window."""
    num_replicas: int
    mesh: Mesh | None
    num_microbatches: int
    num_replicas_with_fewer: int
    """Replicas that run one microbatch fewer; 0 when D divides the microbatches."""
    tokens_per_update: float | None
    tokens_deviation: float | None
    """Of one update's tokens, for independent lengths."""


def measure_lengths(lengths: Sequence[int]) -> Lengths:
    """Mean and sample deviation of measured token counts. Raises UsageError when there are none or one is negative."""
    if not lengths or min(lengths) < 0:
        raise UsageError("lengths must be one non-negative whole number a line, at least one line")
    mean = math.fsum(lengths) / len(lengths)
    spread = math.fsum((length - mean) ** 2 for length in lengths) / max(1, len(lengths) - 1)
    return Lengths(mean_tokens=mean, deviation_tokens=math.sqrt(spread), num_measured=len(lengths))


def plan_batch(request: BatchRequest) -> BatchPlan:
    """Solves B = micro · K · D for the missing one. UsageError when several are missing or nothing fits."""
    replicas = request.mesh.num_replicas if request.mesh is not None else request.num_replicas
    known = {
        "global_batch": request.global_batch,
        "micro_batch": request.micro_batch,
        "num_accumulated": request.num_accumulated,
        "num_replicas": replicas,
    }
    missing = [name for name, value in known.items() if value is None]
    if len(missing) > 1:
        options = ", ".join(_OPTIONS[name] for name in missing)
        raise UsageError(
            f"{len(missing)} unknowns ({options}), and one equation solves one; "
            "give all but one, like --global 64 --micro 2 --replicas 4"
        )
    solved = missing[0] if missing else ""
    numbers = {name: value for name, value in known.items() if value is not None}
    if solved:
        numbers[solved] = _SOLVE[solved](numbers)
    plan = _build(numbers, request, solved)
    if plan.num_accumulated != numbers["num_accumulated"]:
        raise UsageError(
            f"global batch {plan.global_batch} = micro {plan.micro_batch} × accumulate × {plan.num_replicas} replicas "
            f"needs --accumulate {plan.num_accumulated}, not {numbers['num_accumulated']}"
        )
    return plan


def on_ranks(plan: BatchPlan, num_ranks: int) -> tuple[BatchPlan, int]:
    """The same global batch on another number of ranks, and the ranks left idle: whole replicas only.

    Raises UsageError when not one replica fits, or a replica would have no microbatch.
    """
    mesh = plan.mesh or Mesh(num_ranks=plan.num_replicas)
    replicas = num_ranks // mesh.ranks_per_replica
    if replicas < 1:
        raise UsageError(f"{num_ranks} ranks are fewer than the {mesh.ranks_per_replica} of one replica ({mesh})")
    used = replicas * mesh.ranks_per_replica
    lengths = None
    if plan.tokens_per_update is not None:
        deviation = (plan.tokens_deviation or 0.0) / math.sqrt(plan.global_batch)
        lengths = Lengths(mean_tokens=plan.tokens_per_update / plan.global_batch, deviation_tokens=deviation)
    request = BatchRequest(
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        mesh=replace(mesh, num_ranks=used),
        lengths=lengths,
    )
    return plan_batch(request), num_ranks - used


def _build(numbers: dict[str, int], request: BatchRequest, solved: str) -> BatchPlan:
    total, micro, replicas = numbers["global_batch"], numbers["micro_batch"], numbers["num_replicas"]
    microbatches = _num_microbatches(total, micro, replicas)
    most = math.ceil(microbatches / replicas)
    lengths = request.lengths
    return BatchPlan(
        solved=solved,
        global_batch=total,
        micro_batch=micro,
        num_accumulated=most,
        num_replicas=replicas,
        mesh=request.mesh,
        num_microbatches=microbatches,
        num_replicas_with_fewer=most * replicas - microbatches,
        tokens_per_update=None if lengths is None else total * lengths.mean_tokens,
        tokens_deviation=None if lengths is None else math.sqrt(total) * lengths.deviation_tokens,
    )


def _num_microbatches(total: int, micro: int, replicas: int) -> int:
    if total % micro:
        near = max(micro, round(total / micro) * micro)
        raise UsageError(
            f"micro batch {micro} does not divide the global batch {total}; the nearest is --global {near}"
        )
    if total < micro * replicas:
        raise UsageError(
            f"global batch {total} < micro {micro} × {replicas} replicas: a replica would have nothing to do; "
            f"write --global {micro * replicas}, a smaller --micro, or fewer ranks"
        )
    return total // micro


def _exactly(numerator: int, denominator: int, what: str) -> int:
    if numerator % denominator or numerator < denominator:
        near = max(1, round(numerator / denominator)) * denominator
        raise UsageError(
            f"no whole {what} solves it: {numerator} / {denominator} = {numerator / denominator:g}; "
            f"a global batch of {near} would"
        )
    return numerator // denominator


_SOLVE: dict[str, Callable[[dict[str, int]], int]] = {
    "global_batch": lambda n: n["micro_batch"] * n["num_accumulated"] * n["num_replicas"],
    "micro_batch": lambda n: _exactly(n["global_batch"], n["num_accumulated"] * n["num_replicas"], "micro batch"),
    "num_accumulated": lambda n: math.ceil(
        _num_microbatches(n["global_batch"], n["micro_batch"], n["num_replicas"]) / n["num_replicas"]
    ),
    "num_replicas": lambda n: _exactly(
        n["global_batch"], n["micro_batch"] * n["num_accumulated"], "number of replicas"
    ),
}
