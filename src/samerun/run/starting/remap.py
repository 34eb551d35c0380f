"""What a changed batch, curve or clock does to the learning rate of a run that goes on: said by the user, or refused.

A schedule on the update clock and a changed batch leave two honest ways: milestones stay at the same update, or at the
same data. A changed curve or clock is taken only when the user said that it is meant. Each change is told with what was
and what is.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from samerun.core.progress import Progress
from samerun.data.elastic import Decision
from samerun.errors import Refused
from samerun.run.config import RunConfig
from samerun.step.schedule import Clock, ClockedSchedule


def changeable(config: RunConfig) -> list[str]:
    """Parts of a run's identity that may differ because the data's `on_change` or `remap=` says so."""
    names = [f"data.{name}" for name in getattr(config.source, "changeable", ())]
    if config.remap is not None:
        curves = [name for name, scheduler in config.schedulers.items() if isinstance(scheduler, ClockedSchedule)]
        names += [f"scheduler.{name}.state.{part}" for name in curves for part in ("curve", "clock")]
    return names


def remap_schedules(config: RunConfig, progress: Progress) -> list[str]:
    """Applies what the data decided on this resume to every schedule; returns what changed, before and after.

    Raises Refused where the user has to choose.
    """
    data: Decision | None = getattr(config.source, "decision", None)
    remap = config.remap
    batch = data.reason if data is not None and data.resizes_windows else None
    lines: list[str] = []
    for name, scheduler in config.schedulers.items():
        if isinstance(scheduler, ClockedSchedule):
            lines += _remap_curve(name, scheduler, progress, remap=remap, batch=batch)
        elif batch is not None and not isinstance(scheduler, ReduceLROnPlateau):
            lines += _keep_steps(name, scheduler, progress, remap=remap, batch=batch)
    return lines


def _remap_curve(
    name: str, schedule: ClockedSchedule, progress: Progress, *, remap: Clock | None, batch: str | None
) -> list[str]:
    lines = []
    if (saved := schedule.describe_replaced()) is not None:
        lines.append(f"schedule {name}: was {saved}; is {schedule.describe(progress)}")
    if batch is None:
        return lines
    if remap is None:
        if schedule.clock is not Clock.UPDATES:
            return lines  # it counts data, and goes on doing so
        raise Refused(_which_way(name, batch, progress))
    before = schedule.describe(progress)
    schedule.count_by(remap, progress)
    lines.append(
        f"schedule {name}: {batch}; milestones stay at the same {remap.value}: was {before}; is "
        f"{schedule.describe(progress)}"
    )
    return lines


def _keep_steps(name: str, scheduler: Any, progress: Progress, *, remap: Clock | None, batch: str) -> list[str]:
    if remap is None:
        raise Refused(_which_way(name, batch, progress))
    if remap is not Clock.UPDATES:
        raise Refused(
            f"{batch}, and a {type(scheduler).__name__} counts its own steps, one per update: it cannot keep its "
            f"milestones at the same {remap.value}. Say remap='updates', or use a curve of samerun.step.schedule"
        )
    return [f"schedule {name}: {batch}; milestones stay at the same updates, {type(scheduler).__name__} goes on"]


def _which_way(name: str, batch: str, progress: Progress) -> str:
    return (
        f"{batch}, and the schedule {name} counts updates ({progress.updates} done, {progress.samples} samples): its "
        f"milestones would move in data. Say which is meant: Run(remap='updates') keeps them at the same update, "
        f"remap='samples' or 'tokens' at the same data"
    )
