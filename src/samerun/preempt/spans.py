"""How long a notice may have to wait: the longest time without a look at it, and what the run did in that time.

A look is an edge, or `run.alive()` in a long section of the user's own. Time is dealt out to phases as they are
entered; a span is named after the phase that took most of it.
"""

from __future__ import annotations

from collections import defaultdict

from samerun.core.clock import Clock

WINDOW = "window"


class Spans:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._phase = WINDOW
        self._since = self._looked = clock.monotonic_seconds()
        self._taken: defaultdict[str, float] = defaultdict(float)
        self.longest_seconds = 0.0
        self.longest_phase = WINDOW

    def enter(self, phase: str) -> None:
        """What the loop does from now on."""
        now = self._clock.monotonic_seconds()
        self._taken[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def look(self) -> None:
        """Ends a span here."""
        self.enter(self._phase)
        seconds = self._since - self._looked
        if seconds > self.longest_seconds:
            self.longest_seconds = seconds
            self.longest_phase = max(self._taken, key=self._taken.__getitem__)
        self._looked = self._since
        self._taken.clear()

    def __str__(self) -> str:
        return f"{self.longest_seconds:.1f} s ({self.longest_phase})"
