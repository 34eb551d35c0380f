"""Whether being slowest is chance. On N equal ranks each is the slowest of an interval with probability 1/N.

A rank that is flagged in m of the last n intervals lasts where N · P[Binomial(n, 1/N) ≥ m] < 1e-3: eight ranks need 10
of 20, 64 need 5, 512 need 4. Computed exactly, with fractions.
"""

from __future__ import annotations

import math
from collections import deque
from fractions import Fraction
from typing import Final

INTERVALS: Final = 20
CHANCE: Final = Fraction(1, 1000)


def times_needed(num_ranks: int, *, num_intervals: int = INTERVALS, chance: Fraction = CHANCE) -> int:
    """The least m; `num_intervals + 1` (never) where even every interval could be chance, as on one or two ranks."""
    p = Fraction(1, num_ranks)
    tail, needed = Fraction(0), num_intervals + 1
    for m in range(num_intervals, 0, -1):
        tail += math.comb(num_intervals, m) * p**m * (1 - p) ** (num_intervals - m)
        if num_ranks * tail >= chance:
            break
        needed = m
    return needed


class Persistence:
    """Remembers who was flagged in the last n intervals."""

    def __init__(self, num_ranks: int, *, num_intervals: int = INTERVALS) -> None:
        self.needed = times_needed(num_ranks, num_intervals=num_intervals)
        self._flagged: deque[int | None] = deque(maxlen=num_intervals)

    def after(self, rank: int | None) -> int | None:
        """The rank that this interval flagged, or None. Returns the rank that lasts, once its count is enough."""
        self._flagged.append(rank)
        if rank is not None and self._flagged.count(rank) >= self.needed:
            return rank
        return None

    def times(self, rank: int) -> int:
        """How often `rank` was flagged in the last n intervals."""
        return self._flagged.count(rank)
