"""How long a notice may have to wait: the longest time without a look at it, and what the run did in that time.

A look is an edge, or `run.alive()` in a long section of the user's own. Time is dealt out to phases as they are
entered; a span is named after the phase that took most of it.
"""

from __future__ import annotations

from collections import defaultdict

from samerun.core.clock import Clock

WINDOW = "window"


class Spans:
    """`num_left_out`: first spans that are no measure for the rest (opening, and a first window that compiles)."""

    def __init__(self, clock: Clock, *, num_left_out: int = 0) -> None:
        self._clock = clock
        self._num_left_out = num_left_out
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
        if self._num_left_out > 0:
            self._num_left_out -= 1
        elif seconds > self.longest_seconds:
            self.longest_seconds = seconds
            self.longest_phase = max(self._taken, key=self._taken.__getitem__)
        self._looked = self._since
        self._taken.clear()

    def __str__(self) -> str:
        return f"{self.longest_seconds:.1f} s ({self.longest_phase})"
