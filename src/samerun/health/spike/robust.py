"""Median, spread and trend that a few wild values cannot move.

Spread: 1.4826 · median |x − median| is the standard deviation of Gaussian values (Hampel 1974). Trend: the incomplete
form of Theil's estimator (Theil 1950): the median slope over the pairs (i, i + n/2), n/2 slopes instead of n²/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAD_TO_SIGMA: Final = 1.4826
_TINY: Final = 1e-12
"""A constant series has no spread at all; dividing by this makes any other value stand out, and nothing overflow."""


def median(values: Sequence[float]) -> float:
    """Of at least one value; the mean of the middle two of an even number."""
    return middle(sorted(values))


def middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the next value of a series should be, and how far from it is ordinary."""

    center: float
    spread: float

    def z(self, value: float) -> float:
        """How many spreads `value` lies above the centre, cut to ±1e6."""
        return max(-1e6, min(1e6, (value - self.center) / self.spread))


def baseline(values: Sequence[float], *, floor: float) -> Baseline:
    """Of accepted values, oldest first. `floor` is the least spread. A trend is taken out where it exceeds the spread.

    With a trend the centre is where the line stands at the next value, not in the middle of the window.
    """
    ordered = sorted(values)
    center = middle(ordered)
    spread = _spread(ordered, center, floor)
    slope = trend(values)
    if abs(slope) * len(values) <= spread:
        return Baseline(center=center, spread=spread)
    level = sorted(value - slope * (position - len(values)) for position, value in enumerate(values))
    center = middle(level)
    return Baseline(center=center, spread=_spread(level, center, floor))


def trend(values: Sequence[float]) -> float:
    """Median slope per step, over pairs half a window apart; 0 for fewer than two values."""
    half = len(values) // 2
    if half == 0:
        return 0.0
    return median([values[half + i] - values[i] for i in range(half)]) / half


def _spread(ordered: Sequence[float], center: float, floor: float) -> float:
    return max(MAD_TO_SIGMA * median([abs(value - center) for value in ordered]), floor, _TINY)
