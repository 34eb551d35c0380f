"""Whether what must happen after a notice fits before the kill: from measured times, decided at an edge, pure.

    save + teardown + margin ≤ seconds left    save the state of this edge, then leave
    otherwise                                  leave without a save that could not be committed; the last one stays

At an edge the window is already finished or was never begun, so SPEC's "finish the window" has been decided by reaching
it; a window that the kill does not let finish leaves nothing behind, and the run resumes from its last checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from samerun.core.units import format_seconds, parse_seconds
from samerun.plan.availability.deadline import Link, Path, PreemptPlan, plan_preempt
from samerun.preempt.sources import NoticeSource

_REMEMBERED: Final = 20
TEARDOWN_SECONDS: Final = 2.0
"""Closing workers and the process group, seen on CPU; a constant until a run measures its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """What a run knows about being told to stop.

    `warning`: how long there is between a SIGTERM and the kill ("120 s"); None: as long as the launcher gives, or
    unknown. `margin`: spare time to keep. `sources`: notices to poll for.
    """

    warning: str | None = None
    margin: str = "2 s"
    sources: tuple[NoticeSource, ...] = ()

    def links(self, *, launcher_seconds: float | None) -> tuple[Link, ...]:
        """The kill chain as far as it is known."""
        found = []
        if self.warning is not None:
            found.append(Link(name="warning", warning_seconds=parse_seconds(self.warning)))
        if launcher_seconds is not None:
            found.append(Link(name="torchrun", warning_seconds=launcher_seconds))
        return tuple(found)


class Slowest:
    """The largest of the last twenty durations: a bound that forgets, where a mean would be too hopeful."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    @property
    def seconds(self) -> float | None:
        """None while nothing was measured."""
        return max(self._last, default=None)


class Leave(Enum):
    SAVE = "save, then leave"
    AT_ONCE = "leave without saving"


def decide(*, seconds_left: Sequence[float | None], save_seconds: float | None, margin_seconds: float) -> Leave:
    """What to do at the edge where a stop was agreed. `seconds_left` holds every rank's; the nearest deadline counts.

    An unmeasured save is tried: a torn one is never loaded, and the last checkpoint stays.
    """
    known = [seconds for seconds in seconds_left if seconds is not None]
    if not known or save_seconds is None:
        return Leave.SAVE
    need = save_seconds + TEARDOWN_SECONDS + margin_seconds
    return Leave.SAVE if need <= min(known) else Leave.AT_ONCE


def check_budget(
    links: tuple[Link, ...], *, window_seconds: float, save_seconds: float, margin_seconds: float
) -> PreemptPlan | None:
    """The measured path against the kill chain; None where no link is known."""
    if not links:
        return None
    path = Path(
        window_seconds=window_seconds,
        save_seconds=max(save_seconds, 1e-3),
        teardown_seconds=TEARDOWN_SECONDS,
        margin_seconds=margin_seconds,
    )
    return plan_preempt(links, path)


def describe_budget(plan: PreemptPlan) -> str:
    """One sentence: does a stop fit into the warning, and which link limits it."""
    need = format_seconds(plan.path.total_seconds)
    warning = f"{format_seconds(plan.warning_seconds)} of warning (limited by {plan.limiting_link})"
    parts = (
        f"window {format_seconds(plan.path.window_seconds)}, save {format_seconds(plan.path.save_seconds)}, "
        f"teardown and margin {format_seconds(plan.path.teardown_seconds + plan.path.margin_seconds)}"
    )
    if plan.short_seconds == 0:
        return f"a stop needs {need} ({parts}) and has {warning}"
    return f"a stop needs {need} ({parts}) but has only {warning}; {plan.remedy}"
