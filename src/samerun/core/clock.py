"""Time as a dependency: the system's clocks, and one that tests turn by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    def monotonic_seconds(self) -> float:
        """Seconds since an arbitrary moment; never goes backwards."""

    def wall_seconds(self) -> float:
        """Seconds since the epoch; may jump. For records that people read, never for decisions."""


class SystemClock:
    def monotonic_seconds(self) -> float:
        return time.monotonic()

    def wall_seconds(self) -> float:
        return time.time()


@dataclass(slots=True)
class ManualClock:
    """A clock for tests: stands still until `advance` is called."""

    seconds: float = 0.0
    wall_offset_seconds: float = 1.7e9

    def monotonic_seconds(self) -> float:
        return self.seconds

    def wall_seconds(self) -> float:
        return self.seconds + self.wall_offset_seconds

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self.seconds += seconds
