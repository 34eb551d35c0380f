"""What an attempt measured of itself, for the next one: a budget can be checked at a start, before anything is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from samerun.core.events import Journal

_EVENT: Final = "timings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """At the slow end of what was seen. None: never measured."""

    window_seconds: float | None
    save_seconds: float | None
    span_seconds: float
    """The longest time without a look at notices."""
    span_phase: str

    def write(self, journal: Journal) -> None:
        journal.write(
            _EVENT,
            window_seconds=self.window_seconds,
            save_seconds=self.save_seconds,
            span_seconds=self.span_seconds,
            span_phase=self.span_phase,
        )

    def __str__(self) -> str:
        known = [("window", self.window_seconds), ("save", self.save_seconds)]
        said = [f"{name} {seconds:.1f} s" for name, seconds in known if seconds is not None]
        return ", ".join([*said, f"longest time without an edge {self.span_seconds:.1f} s ({self.span_phase})"])


def last_timings(journals: Sequence[Sequence[dict[str, Any]]]) -> Timings | None:
    """The newest of earlier attempts, whose journals come oldest first; None where none got so far."""
    for events in reversed(journals):
        for event in reversed(events):
            if event["event"] == _EVENT:
                return Timings(**{name: event[name] for name in Timings.__dataclass_fields__})
    return None
