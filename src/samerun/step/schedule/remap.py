"""What a changed batch, curve or clock does to the learning rate of a training that goes on: said by the user, or
refused.

A schedule on the update clock and a changed batch leave two honest ways: milestones stay at the same update, or at the
same data. A changed curve or clock is taken only when the user said that it is meant. Each change is told with what was
and what is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from samerun.core.progress import Progress
from samerun.errors import UsageError
from samerun.step.schedule.clocked import ClockedSchedule
from samerun.step.schedule.curves import Clock


def require_choice(
    schedulers: Mapping[str, Any], progress: Progress, *, remap: Clock | None, batch: str | None
) -> None:
    """Raises UsageError where the user has to choose. `batch`: how the batch changed, in words; None: it did not."""
    if batch is None:
        return
    for name, scheduler in schedulers.items():
        if isinstance(scheduler, ClockedSchedule):
            if remap is None and scheduler.clock is Clock.UPDATES:
                raise UsageError(_which_way(name, batch, progress))
        elif not isinstance(scheduler, ReduceLROnPlateau):
            _require_updates(name, scheduler, progress, remap=remap, batch=batch)


def remap_loaded(
    schedulers: Mapping[str, Any], progress: Progress, *, remap: Clock | None, batch: str | None
) -> list[str]:
    """Applies to schedules that were just loaded at `progress` what was chosen; returns what changed, before and after.

    Raises UsageError where the user has to choose.
    """
    require_choice(schedulers, progress, remap=remap, batch=batch)
    lines: list[str] = []
    for name, scheduler in schedulers.items():
        if isinstance(scheduler, ClockedSchedule):
            lines += _remap_curve(name, scheduler, progress, remap=remap, batch=batch)
        elif batch is not None and not isinstance(scheduler, ReduceLROnPlateau):
            kind = type(scheduler).__name__
            lines.append(f"schedule {name}: {batch}; milestones stay at the same updates, {kind} goes on")
    return lines


def _remap_curve(
    name: str, schedule: ClockedSchedule, progress: Progress, *, remap: Clock | None, batch: str | None
) -> list[str]:
    lines = []
    if (saved := schedule.describe_replaced()) is not None:
        lines.append(f"schedule {name}: was {saved}; is {schedule.describe(progress)}")
    if batch is None or remap is None:
        return lines  # a curve that counts data goes on doing so
    before = schedule.describe(progress)
    schedule.count_by(remap, progress)
    lines.append(
        f"schedule {name}: {batch}; milestones stay at the same {remap.value}: was {before}; is "
        f"{schedule.describe(progress)}"
    )
    return lines


def _require_updates(name: str, scheduler: Any, progress: Progress, *, remap: Clock | None, batch: str) -> None:
    if remap is None:
        raise UsageError(_which_way(name, batch, progress))
    if remap is not Clock.UPDATES:
        raise UsageError(
            f"{batch}, and a {type(scheduler).__name__} counts its own steps, one per update: it cannot keep its "
            f"milestones at the same {remap.value}. Say remap='updates', or use a curve of samerun.step.schedule"
        )


def _which_way(name: str, batch: str, progress: Progress) -> str:
    return (
        f"{batch}, and the schedule {name} counts updates ({progress.updates} done, {progress.samples} samples): its "
        f"milestones would move in data. Say which is meant: remap='updates' keeps them at the same update, "
        f"remap='samples' or 'tokens' at the same data"
    )
