"""Learning rates as pure functions of a named clock, and any torch scheduler beside them."""

from samerun.step.schedule.clocked import (
    ClockedSchedule,
    Origin,
    clocked,
    is_curve,
    lr_setters,
    step_schedulers,
)
from samerun.step.schedule.curves import (
    Clock,
    Constant,
    Curve,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
)
from samerun.step.schedule.remap import remap_loaded, require_choice

__all__ = [
    "Clock",
    "ClockedSchedule",
    "Constant",
    "Curve",
    "Origin",
    "WarmupCosine",
    "WarmupLinear",
    "WarmupStableDecay",
    "clocked",
    "is_curve",
    "lr_setters",
    "remap_loaded",
    "require_choice",
    "step_schedulers",
]
