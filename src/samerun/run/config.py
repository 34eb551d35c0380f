"""What a user says about a run, checked once. Nothing here touches a file, a device or another rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from samerun.core.choice import Choice, whole_number
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
from samerun.step.parts import TrainedParts
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
        keep_last = whole_number(self.keep_last, option="keep_last", at_least=1)
        object.__setattr__(self, "keep_last", keep_last)
        if not isinstance(self.background, bool):
            raise UsageError(f"background={self.background!r}: write True or False")
        if self.max_staging_bytes is not None:
            whole_number(self.max_staging_bytes, option="max_staging_bytes", at_least=0, instead="None sets no bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    path: str
    parts: TrainedParts
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
        if not self.path:
            raise UsageError("the run's path is empty; write a folder of its own, or a URL, such as 'runs/first'")
        self._check_kinds()
        for name in self.extra:
            if name in COMPONENTS and name != "ema":
                raise UsageError(f"extra={{{name!r}: …}}: the name is one of Run's own components; choose another")
            if "/" in name or not name:
                raise UsageError(f"extra={{{name!r}: …}}: names may not be empty or contain '/'")
        _check_batches_arrive(self.source, self.parts.device_types)
        known = {*COMPONENTS, *self.extra}
        if unknown := sorted(set(self.waive) - known):
            raise UsageError(f"waive={unknown}: no such component; this run has {', '.join(sorted(known))}")

    @property
    def models(self) -> Mapping[str, nn.Module]:
        return self.parts.models

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        return self.parts.optimizers

    @property
    def schedulers(self) -> Mapping[str, SchedulerLike]:
        return self.parts.schedulers

    def _check_kinds(self) -> None:
        for what, value, kind in (
            ("mesh", self.mesh, DeviceMesh),
            ("preemption", self.preemption, Preemption),
            ("plan", self.plan, RunPlan),
        ):
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{what}= got {value!r}; give a {kind.__name__}, or leave it out")
        for name, component in self.extra.items():
            if missing := [m for m in ("state_dict", "load_state_dict") if not callable(getattr(component, m, None))]:
                raise UsageError(
                    f"extra={{{name!r}: …}}: a {type(component).__name__} has no {' and no '.join(missing)}; give an "
                    f"object with both, or a plain value as identity="
                )


def _check_batches_arrive(source: DataSource, device_types: Collection[str]) -> None:
    """The data's own `device=` against where the model is; batches that the loop moves itself are seen by nobody."""
    device = getattr(source, "device", None)
    if device is None:
        return
    try:
        found = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={device!r} of the data is no device: {str(error).splitlines()[0]}") from error
    if found not in device_types:
        raise UsageError(
            f"the data moves its batches to device={str(device)!r}, the model is on {sorted(device_types)}; move the "
            f"model there before the optimizer is made, or leave device= out"
        )


def as_table(value: Any, *, option: str) -> dict[str, Any]:
    """A mapping as it is, None as an empty one. Raises UsageError for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{option}= got a {type(value).__name__}; give a dict by name, such as {{'ema': ema}}")
    return dict(value or {})
