"""The ladder: evidence first, each rung bounded. A pure function; whoever runs the training executes and records.

    0 observe              most spikes recover by themselves
    1 skip the update      data consumed, counted (the step does this for what is not finite)
    2 retry the window     once
    3 rewind, same data    the experiment: without recurrence the data is innocent
    4 rewind, skip range   from onset − 50 to alarm + 150 windows, as a recorded quarantine
    5 … and a lower rate   learning rate halved for a while (advice only: budgets end before it by default)
    6 stop                 a person decides

Budgets: 2 rewinds for one region (onset ± 500 windows), 4 in 24 hours, 1 % of the planned samples quarantined, quiet
for 200 windows after an action. They are given back only by progress beyond the farthest window reached before (not the
daily one). A second skip that overlaps a failed one ends skipping: BLOOM's 104B precursor shows that it does not help.
Positions of windows are counted from the target's cursor; ranges that are quarantined already are not counted in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Final

from samerun.health.rollback.good import Candidate, Considered, Suspect, consider, in_step
from samerun.health.spike.detector import RECOVERY_WINDOWS

_DAY_SECONDS: Final = 86_400.0
_SAME_DATA: Final = 20
"""Windows past the onset that the same data is given to go wrong again."""


class Rung(IntEnum):
    OBSERVE = 0
    SKIP = 1
    RETRY = 2
    REWIND_SAME_DATA = 3
    REWIND_AND_SKIP = 4
    REWIND_SKIP_LOWER_RATE = 5
    STOP = 6

    @property
    def rewinds(self) -> bool:
        return Rung.REWIND_SAME_DATA <= self <= Rung.REWIND_SKIP_LOWER_RATE


class Trigger(Enum):
    NON_FINITE = "non_finite"
    """Windows skipped in a row because a loss or gradient was not finite."""
    SPIKE = "spike"
    """A spike that has not been judged yet."""
    UNRECOVERED = "unrecovered"
    """A spike that shifted, diverges or did not recover."""
    DESYNC = "desync"
    """Replicas that must hold the same bytes do not; `onset` is the last window after which they were seen to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    trigger: Trigger
    onset: int
    alarm: int
    now: int
    """Windows decided so far."""
    in_a_row: int = 1
    """How many windows in a row were not finite."""
    was_retried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One earlier decision of this run, as the budget sees it."""

    rung: Rung
    onset: int
    at_window: int
    farthest_window: int
    """How far the run had ever come when it acted."""
    at_seconds: float
    """Wall time, for the daily budget only."""
    skipped: tuple[int, int] | None = None
    """Positions [start, stop) that it quarantined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    rewinds_per_region: int = 2
    region_windows: int = 500
    rewinds_per_day: int = 4
    quarantined_share: float = 0.01
    quiet_windows: int = 2 * RECOVERY_WINDOWS
    skips_in_a_row: int = 5
    skip_before: int = 50
    skip_after: int = 150
    rate_factor: float = 0.5
    rate_windows: int = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything a decision rests on besides the incident."""

    candidates: Sequence[Candidate] = ()
    suspects: Sequence[Suspect] = ()
    past: Sequence[Action] = ()
    margin: int = 100
    samples_per_window: int = 1
    planned_samples: int | None = None
    good_until: int = 0
    """Windows up to which everything is known to have gone well: committed progress."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A rung with its reasons; nothing has happened yet."""

    rung: Rung
    reason: str
    target: Candidate | None = None
    skip: tuple[int, int] | None = None
    """Positions [start, stop) to quarantine."""
    rate_factor: float = 1.0
    rate_windows: int = 0
    considered: tuple[Considered, ...] = ()
    expected: str = ""
    """What should be seen afterwards, so that the outcome can be held against it."""
    check_until: int = 0
    """Windows decided by when that is seen."""
    budget: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "rung": self.rung.name.lower(),
            "reason": self.reason,
            "target": None
            if self.target is None
            else {"name": self.target.name, "digest": self.target.digest, "windows": self.target.windows},
            "skip": None if self.skip is None else list(self.skip),
            "rate_factor": self.rate_factor,
            "rate_windows": self.rate_windows,
            "considered": [one.to_json() for one in self.considered],
            "expected": self.expected,
            "budget": self.budget,
        }


def decide(incident: Incident, situation: Situation, limits: Limits | None = None) -> Decided:
    """The lowest rung that the evidence and the budgets allow."""
    limits = limits or Limits()
    counted = _counted(situation)
    last = max((action.at_window for action in counted if action.rung.rewinds), default=None)
    if incident.trigger is Trigger.SPIKE:
        return Decided(rung=Rung.OBSERVE, reason="most spikes recover by themselves; wait for what becomes of it")
    if incident.trigger is Trigger.NON_FINITE and incident.in_a_row < limits.skips_in_a_row:
        return Decided(
            rung=Rung.SKIP, reason=f"{incident.in_a_row} in a row, up to {limits.skips_in_a_row} are skipped"
        )
    if incident.trigger is Trigger.NON_FINITE and not incident.was_retried:
        return Decided(rung=Rung.RETRY, reason=f"{incident.in_a_row} in a row: the same window once more tells whether")
    is_spike = incident.trigger is not Trigger.DESYNC  # bytes that differ are no matter of statistics
    if is_spike and last is not None and 0 <= incident.now - last < limits.quiet_windows:
        reason = f"{incident.now - last} windows after an action; {limits.quiet_windows} are left quiet"
        return Decided(rung=Rung.OBSERVE, reason=reason)
    return _rewind(incident, situation, limits, counted)


def _rewind(incident: Incident, situation: Situation, limits: Limits, counted: Sequence[Action]) -> Decided:
    near = [a for a in counted if a.rung.rewinds and abs(a.onset - incident.onset) <= limits.region_windows]
    today = [
        a for a in situation.past if a.rung.rewinds and situation.seconds - a.at_seconds < _DAY_SECONDS
    ]  # progress does not give these back
    budget = {
        "rewinds_here": [len(near), limits.rewinds_per_region],
        "rewinds_today": [len(today), limits.rewinds_per_day],
    }
    if len(near) >= limits.rewinds_per_region:
        return _stop(f"{len(near)} rewinds for this region did not help", budget)
    if len(today) >= limits.rewinds_per_day:
        return _stop(f"{len(today)} rewinds within 24 hours", budget)
    considered = (
        in_step(situation.candidates, last_equal=incident.onset)
        if incident.trigger is Trigger.DESYNC
        else consider(
            situation.candidates,
            onset=incident.onset,
            now=incident.now,
            margin=situation.margin,
            suspects=situation.suspects,
        )
    )
    target = next((one.candidate for one in considered if one.why_not is None), None)
    if target is None:
        return _stop("no good checkpoint lies far enough before the onset", budget, considered)
    if incident.trigger is Trigger.DESYNC:
        return Decided(
            rung=Rung.REWIND_SAME_DATA,
            reason="one replica's bytes are not its peers', which no data explains",
            target=target,
            considered=tuple(considered),
            expected=f"replicas agree when window {incident.now} has passed again, else a device is to blame",
            check_until=incident.now,
            budget=budget,
        )
    if not near:
        return Decided(
            rung=Rung.REWIND_SAME_DATA,
            reason="the same data first: a spike that does not come back was not the data's fault",
            target=target,
            considered=tuple(considered),
            expected=f"windows up to {incident.onset + _SAME_DATA} pass without an alarm, else the data is suspect",
            check_until=incident.onset + _SAME_DATA,
            budget=budget,
        )
    return _skipping(incident, situation, limits, near, target, considered, budget)


def _skipping(
    incident: Incident, situation: Situation, limits: Limits, near: Sequence[Action], target: Candidate,
    considered: Sequence[Considered], budget: dict[str, Any],
) -> Decided:  # fmt: skip
    first = max(target.windows, incident.onset - limits.skip_before)
    size = situation.samples_per_window
    start = target.position + (first - target.windows) * size
    stop = target.position + (incident.alarm + limits.skip_after - target.windows) * size
    already = sum(b - a for action in situation.past if action.skipped for a, b in [action.skipped])
    overlaps = any(action.skipped and action.skipped[0] < stop and start < action.skipped[1] for action in near)
    if situation.planned_samples is not None:
        allowed = int(limits.quarantined_share * situation.planned_samples)
        budget = {**budget, "quarantined": [already, already + stop - start, allowed]}
        if already + stop - start > allowed:
            return _stop(f"skipping {stop - start} samples more would exceed {allowed}", budget, considered)
    if overlaps and limits.rewinds_per_region <= len(near) + 1:
        return _stop("a skip of this range did not help before", budget, considered)
    lower = overlaps
    return Decided(
        rung=Rung.REWIND_SKIP_LOWER_RATE if lower else Rung.REWIND_AND_SKIP,
        reason="the spike came back on the same data" + (", also after a skip" if lower else ""),
        target=target,
        skip=(start, stop),
        rate_factor=limits.rate_factor if lower else 1.0,
        rate_windows=limits.rate_windows if lower else 0,
        considered=tuple(considered),
        expected=f"{RECOVERY_WINDOWS} windows behind the skipped range without an alarm",
        check_until=first + RECOVERY_WINDOWS,
        budget=budget,
    )


def _stop(reason: str, budget: dict[str, Any], considered: Sequence[Considered] = ()) -> Decided:
    return Decided(rung=Rung.STOP, reason=reason, budget=budget, considered=tuple(considered))


def _counted(situation: Situation) -> list[Action]:
    """Actions that still weigh: those whose farthest window has not been passed by good progress since."""
    return [action for action in situation.past if situation.good_until <= action.farthest_window]
