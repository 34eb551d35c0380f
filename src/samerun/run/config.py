"""What a user says about a run, checked once. Nothing here touches a file, a device or another rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samerun.core.component import COMPONENTS
from samerun.data.source import DataSource
from samerun.errors import UsageError
from samerun.health.options import HealthOptions
from samerun.plan.run import RunPlan
from samerun.preempt.budget import Preemption
from samerun.run.goal import SaveInterval
from samerun.state.extra import Stateful
from samerun.state.schedule import SchedulerLike
from samerun.step.options import StepOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    path: str
    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    schedulers: Mapping[str, SchedulerLike]
    source: DataSource
    extra: Mapping[str, Stateful]
    identity: Mapping[str, Any]
    mesh: DeviceMesh | None
    step: StepOptions
    save_interval: SaveInterval
    keep_last: int
    waive: tuple[str, ...]
    preemption: Preemption
    plan: RunPlan | None
    health: HealthOptions

    def __post_init__(self) -> None:
        for name in self.extra:
            if name in COMPONENTS and name != "ema":
                raise UsageError(f"extra={{{name!r}: …}}: the name is one of Run's own components; choose another")
            if "/" in name or not name:
                raise UsageError(f"extra={{{name!r}: …}}: names may not be empty or contain '/'")
        if self.keep_last < 1:
            raise UsageError(f"keep_last={self.keep_last}: at least one checkpoint is always kept")
        known = {*COMPONENTS, *self.extra}
        if unknown := sorted(set(self.waive) - known):
            raise UsageError(f"waive={unknown}: no such component; this run has {', '.join(sorted(known))}")


def as_mapping(value: Any) -> dict[str, Any]:
    """One object, or several by name."""
    if isinstance(value, Mapping):
        return dict(value)
    return {"model": value}
