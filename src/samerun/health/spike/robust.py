"""Median, spread and trend that a few wild values cannot move.

Spread: 1.4826 · median |x − median| is the standard deviation of Gaussian values (Hampel 1974). Trend: the incomplete
form of Theil's estimator (Theil 1950): the median slope over the pairs (i, i + n/2), n/2 slopes instead of n²/2.

`Rolling` gives the same numbers, bit for bit, of the last n values: it keeps them and the differences of those pairs
in order, so a new value costs two insertions and a binary search instead of four sorts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
    return _without_trend(values, slope, floor)


def _without_trend(values: Iterable[float], slope: float, floor: float) -> Baseline:
    values = list(values)
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


class Rolling:
    """The last `width` (an even number) values, oldest first, and their `baseline` at any time."""

    def __init__(self, width: int) -> None:
        self._values: deque[float] = deque(maxlen=width)
        self._ordered: list[float] = []
        self._half = width // 2
        self._rises: list[float] = []
        """Of the pairs half a window apart, in order; kept once the window is full."""

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    @property
    def newest_half(self) -> float:
        """The value in the middle of the window, by age."""
        return self._values[len(self._values) // 2]

    def append(self, value: float) -> None:
        values, ordered, half = self._values, self._ordered, self._half
        if len(values) == 2 * half:
            oldest, between = values[0], values[half]
            del ordered[bisect_left(ordered, oldest)]
            del self._rises[bisect_left(self._rises, between - oldest)]
            insort(self._rises, value - between)
        values.append(value)
        insort(ordered, value)
        if len(values) == 2 * half and len(self._rises) != half:
            self._rises = sorted(values[half + i] - values[i] for i in range(half))

    def clear(self) -> None:
        self._values.clear()
        self._ordered.clear()
        self._rises.clear()

    def baseline(self, *, floor: float) -> Baseline:
        if len(self._values) < 2 * self._half:
            return baseline(list(self._values), floor=floor)
        center = middle(self._ordered)
        spread = max(MAD_TO_SIGMA * _middle_deviation(self._ordered, center), floor, _TINY)
        slope = middle(self._rises) / self._half
        if abs(slope) * len(self._values) <= spread:
            return Baseline(center=center, spread=spread)
        return _without_trend(self._values, slope, floor)


def _middle_deviation(ordered: Sequence[float], center: float) -> float:
    """The median of |x − center| of an even number of values in order.

    Deviations of the values below the centre grow downwards, of the others upwards: two ordered lists, merged by a
    binary search for how many of the smaller half lie below.
    """
    take = len(ordered) // 2
    split = bisect_left(ordered, center)
    low, high = max(0, take - (len(ordered) - split)), min(take, split)
    while low < high:
        below = (low + high) // 2
        if center - ordered[split - 1 - below] < ordered[split + take - below - 1] - center:
            low = below + 1
        else:
            high = below
    last, following = [], []
    if low:
        last.append(center - ordered[split - low])
    if take > low:
        last.append(ordered[split + take - low - 1] - center)
    if low < split:
        following.append(center - ordered[split - 1 - low])
    if split + take - low < len(ordered):
        following.append(ordered[split + take - low] - center)
    return (max(last) + min(following)) / 2
