"""Whether a run hangs: a deadline for each phase, learned from the run itself. Reports; never kills anything.

deadline = max(FLOOR, 5 × the longest of the last 20), and FIRST while a phase has been seen fewer than 3 times (first
windows compile, first reads are cold). Phases are timed apart, so a long save is not a hang of the loop. Monotonic time
only: a jump of the wall clock changes nothing.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samerun.core.clock import Clock, SystemClock
from samerun.core.events import read_events

FACTOR: Final = 5.0
FLOOR_SECONDS: Final = 60.0
FIRST_SECONDS: Final = 1800.0
_REMEMBERED: Final = 20
_MIN_SEEN: Final = 3
_LOOKS_LATER: Final = 3


class Deadlines:
    """How long each phase may take, from how long it took."""

    def __init__(self, *, floor_seconds: float = FLOOR_SECONDS, first_seconds: float = FIRST_SECONDS) -> None:
        self._floor = floor_seconds
        self._first = first_seconds
        self._seen: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def took(self, phase: str, seconds: float) -> None:
        self._seen[phase].append(seconds)

    def longest(self, phase: str) -> float:
        return max(self._seen[phase], default=0.0)

    def seconds(self, phase: str) -> float:
        if len(self._seen[phase]) < _MIN_SEEN:
            return self._first
        return max(self._floor, FACTOR * self.longest(phase))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """One rank that has been in one phase for longer than its deadline."""

    phase: str
    where: str
    seconds: float
    deadline: float
    longest: float

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s in {self.where} ({self.phase}), where the longest so far was {self.longest:.1f} s; "
            f"nothing is stopped"
        )


class PhaseWatch:
    """Which phase this rank is in, and whether it is overdue. `enter` is all the loop calls; it is cheap."""

    def __init__(self, *, deadlines: Deadlines | None = None, clock: Clock | None = None) -> None:
        self.deadlines = deadlines or Deadlines()
        self._clock = clock or SystemClock()
        self._now: tuple[str, str, float] | None = None
        self._told: float | None = None

    def enter(self, phase: str, where: str) -> None:
        """The loop is now in `phase`; `where` says which window. Ends the phase before."""
        now = self._clock.monotonic_seconds()
        if self._now is not None:
            self.deadlines.took(self._now[0], now - self._now[2])
        self._now = (phase, where, now)

    def leave(self) -> None:
        """Nothing is watched until the next `enter`."""
        self._now = None

    def overdue(self) -> Overdue | None:
        """Once for each phase that is entered and does not end in time."""
        current = self._now
        if current is None or current[2] == self._told:
            return None
        phase, where, since = current
        seconds, deadline = self._clock.monotonic_seconds() - since, self.deadlines.seconds(phase)
        if seconds <= deadline:
            return None
        self._told = since
        longest = self.deadlines.longest(phase)
        return Overdue(phase=phase, where=where, seconds=seconds, deadline=deadline, longest=longest)


class HangWatch:
    """A daemon thread that asks a PhaseWatch every few seconds and calls `report` with what is overdue.

    A few looks later, when peers have had the time to report themselves, it calls `later` with the same.
    """

    def __init__(
        self,
        watch: PhaseWatch,
        report: Callable[[Overdue], None],
        *,
        later: Callable[[Overdue], None] = lambda found: None,
        every_seconds: float = 5.0,
    ) -> None:
        self._watch = watch
        self._report = report
        self._later = later
        self._every = every_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samerun-hang-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(self._every + 1)

    def _run(self) -> None:
        reported: Overdue | None = None
        looks = 0
        while not self._ended.wait(self._every):
            found = self._watch.overdue()
            if found is not None:
                self._report(found)
                reported, looks = found, 0
            elif reported is not None and (looks := looks + 1) == _LOOKS_LATER:
                self._later(reported)
                reported = None


def phases_told(folder: Path, *, overdue: str = "overdue") -> dict[int, str]:
    """Rank → the phase that it last said it hangs in, from the findings of every rank in `folder`."""
    phases = {}
    for file in sorted(folder.glob("rank-*.findings.jsonl")):
        told = [event["phase"] for event in read_events(file) if event["event"] == overdue]
        if told:
            phases[int(file.name[5:10])] = str(told[-1])
    return phases


WAITING: Final = frozenset({"backward and step"})
"""Phases that wait for peers: a rank in one of them stands there because another one is missing."""


def missing_ranks(phases: Mapping[int, str], *, num_ranks: int) -> list[int]:
    """Who is being waited for: ranks that do not wait themselves, and ranks that said nothing. Empty when all wait."""
    return [rank for rank in range(num_ranks) if phases.get(rank) not in WAITING]
