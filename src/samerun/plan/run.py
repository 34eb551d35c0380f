"""A run's whole plan: memory, batch, schedule and saving in one record, kept with the run and compared when it resumes.

`replan` answers "what changes if I lose 3 of 8 ranks?": the same model and global batch on other ranks, everything
recomputed. `samerun.plan.diff` of the two plans is the answer, field by field.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from samerun.plan.availability.interval import IntervalPlan
from samerun.plan.batch import BatchPlan, on_ranks
from samerun.plan.memory.plan import MemoryPlan, plan_memory
from samerun.plan.memory.request import MemoryRequest
from samerun.plan.mesh import Mesh
from samerun.plan.schedule import SchedulePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What was planned for a run; parts that were not planned are None."""

    SCHEMA: ClassVar[str] = "samerun.plan.run.v1"

    batch: BatchPlan
    memory: MemoryPlan | None = None
    schedule: SchedulePlan | None = None
    interval: IntervalPlan | None = None
    num_idle_ranks: int = 0
    """Ranks that form no whole replica."""
    measured_peak_bytes: int | None = None
    """The largest peak seen, to hold against the memory plan's bounds."""

    @property
    def peak_over_upper(self) -> float | None:
        """Measured peak over the upper bound; above 1 the plan was wrong, and its ratio is the correction."""
        if self.measured_peak_bytes is None or self.memory is None or not self.memory.upper_bytes:
            return None
        return self.measured_peak_bytes / self.memory.upper_bytes


def replan(plan: RunPlan, num_ranks: int) -> RunPlan:
    """The same run on `num_ranks` ranks: global batch, schedule and model kept; accumulation and memory recomputed.

    The interval and the measured peak belong to the old machines and are dropped. Raises UsageError when no replica
    fits.
    """
    batch, idle = on_ranks(plan.batch, num_ranks)
    memory = None if plan.memory is None else plan_memory(_on(plan.memory, batch))
    return RunPlan(batch=batch, memory=memory, schedule=plan.schedule, num_idle_ranks=idle)


def _on(memory: MemoryPlan, batch: BatchPlan) -> MemoryRequest:
    mesh = batch.mesh or Mesh(num_ranks=batch.num_replicas)
    request = memory.request
    return replace(
        request,
        layout=replace(request.layout, mesh=mesh),
        batch=replace(request.batch, num_sequences=batch.micro_batch, num_accumulated=batch.num_accumulated),
    )
