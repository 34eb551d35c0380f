"""What may change between two starts of a run because the user said so, and what it does to the learning rate.

What a changed batch, curve or clock means is decided in samerun.step.schedule.remap; a run refuses what is not said.
"""

from __future__ import annotations

from samerun.core.progress import Progress
from samerun.data.elastic import Decision
from samerun.errors import Refused, UsageError
from samerun.run.config import RunConfig
from samerun.step.schedule import ClockedSchedule, remap_loaded


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
    batch = data.reason if data is not None and data.resizes_windows else None
    try:
        return remap_loaded(config.schedulers, progress, remap=config.remap, batch=batch)
    except UsageError as error:
        raise Refused(str(error)) from error
