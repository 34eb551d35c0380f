"""What a user says about a run, checked once. Nothing here touches a file, a device or another rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samerun.core.choice import Choice
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
from samerun.step.schedule import Clock


class OnSaveError(Choice):
    """What a failed save means for the training. Earlier checkpoints stay whole either way."""

    STOP = "stop"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """When a run saves, how, and what a failure means."""

    interval: SaveInterval
    keep_last: int
    background: bool
    on_error: OnSaveError
    max_staging_bytes: int | None
    """The most that a rank may copy for a background save; a larger one is made in the foreground."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(f"keep_last={self.keep_last}: at least one checkpoint is always kept")
        if self.max_staging_bytes is not None and self.max_staging_bytes < 0:
            raise UsageError(f"max_staging_bytes={self.max_staging_bytes}: write a number of bytes, or leave it out")


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
    saves: SaveOptions
    waive: tuple[str, ...]
    remap: Clock | None
    preemption: Preemption
    plan: RunPlan | None
    health: HealthOptions

    def __post_init__(self) -> None:
        for name in self.extra:
            if name in COMPONENTS and name != "ema":
                raise UsageError(f"extra={{{name!r}: …}}: the name is one of Run's own components; choose another")
            if "/" in name or not name:
                raise UsageError(f"extra={{{name!r}: …}}: names may not be empty or contain '/'")
        known = {*COMPONENTS, *self.extra}
        if unknown := sorted(set(self.waive) - known):
            raise UsageError(f"waive={unknown}: no such component; this run has {', '.join(sorted(known))}")


def as_mapping(value: Any) -> dict[str, Any]:
    """One object, or several by name."""
    if isinstance(value, Mapping):
        return dict(value)
    return {"model": value}
