"""One report interval: which rank is slow, and what kind of slow. A pure function over one row of medians a rank.

    slow[r] = c[r] / median(c)      z[r] = (c[r] − median) / max(1.4826·MAD, 1 % of the median)
    cost[r] = (max c − second max c) / window: what taking r away would buy

Flagged at slow ≥ 1.05, z ≥ 5 and cost ≥ 2 % together; no fixed multiple of the median, which misses a 12 % slow rank.
c is a rank's own work over *all* its groups. A rank that comes late only because its tensor-parallel peer is slow has
an ordinary c and is never blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from samerun.health.spike.robust import MAD_TO_SIGMA, median

MIN_SLOW: Final = 1.05
MIN_Z: Final = 5.0
MIN_COST: Final = 0.02
_RELATIVE_FLOOR: Final = 0.01
_EXPLAINED: Final = 0.8
_TAIL_RATIO: Final = 1.25


class Cause(Enum):
    INPUT = "input"
    """Waiting for data makes at least 80 % of the excess."""
    IMBALANCE = "imbalance"
    """It was given more tokens, and the time goes with the tokens."""
    COMPUTE = "compute"
    """Its own work takes longer than its peers'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank's medians over a report interval, in seconds."""

    compute: float
    """Its own work: window time without waiting for data and without anything that waits for peers."""
    data: float
    """Waiting for data."""
    wait: float
    """In what waits for peers, from arriving to its end."""
    tokens: float = 0.0
    compute_tail: float = 0.0
    """The 99 % quantile of its own work; 0 where it was not measured."""

    @property
    def own(self) -> float:
        return self.compute + self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    rank: int
    slow: float
    z: float
    cost: float
    cause: Cause

    @property
    def is_flagged(self) -> bool:
        return self.slow >= MIN_SLOW and self.z >= MIN_Z and self.cost >= MIN_COST

    def to_json(self) -> dict[str, Any]:
        figures = {"slow": round(self.slow, 4), "z": round(self.z, 2), "cost": round(self.cost, 4)}
        return {"rank": self.rank, "cause": self.cause.value, **figures}

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {self.slow:.2f}x its peers' time for its own work ({self.cause.value}; "
            f"z {self.z:.1f}); without it a window would be {self.cost:.1%} shorter"
        )


def scores(rows: Sequence[Row]) -> list[Score]:
    """One a rank, in rank order. With fewer than three ranks nobody can be out of the ordinary, and cost is 0."""
    own = [row.own for row in rows]
    center = median(own) if own else 0.0
    spread = max(
        MAD_TO_SIGMA * median([abs(value - center) for value in own]) if own else 0.0, _RELATIVE_FLOOR * center
    )
    ordered = sorted(own, reverse=True)
    window = max((row.own + row.wait for row in rows), default=0.0)
    gain = ordered[0] - ordered[1] if len(rows) >= 3 else 0.0
    return [
        Score(
            rank=rank,
            slow=row.own / center if center > 0 else 1.0,
            z=(row.own - center) / spread if spread > 0 else 0.0,
            cost=gain / window if window > 0 and row.own == ordered[0] else 0.0,
            cause=_cause(row, rows),
        )
        for rank, row in enumerate(rows)
    ]


def straggler(rows: Sequence[Row]) -> Score | None:
    """The rank that is flagged in this interval; None is by far the usual answer."""
    return next((score for score in scores(rows) if score.is_flagged), None)


def jitter(rows: Sequence[Row]) -> list[int]:
    """Ranks whose slowest windows are slow but whose median is not: a disturbed host, no slow device."""
    tails = [row.compute_tail for row in rows]
    if not tails or min(tails) <= 0:
        return []
    center, tail = median([row.compute for row in rows]), median(tails)
    return [
        rank
        for rank, row in enumerate(rows)
        if row.compute_tail > _TAIL_RATIO * tail and row.compute < MIN_SLOW * center
    ]


def _cause(row: Row, rows: Sequence[Row]) -> Cause:
    excess = row.own - median([other.own for other in rows])
    if excess <= 0:
        return Cause.COMPUTE
    if row.data - median([other.data for other in rows]) >= _EXPLAINED * excess:
        return Cause.INPUT
    tokens = median([other.tokens for other in rows])
    per_token = median([other.compute / other.tokens for other in rows if other.tokens > 0] or [0.0])
    if tokens > 0 and (row.tokens - tokens) * per_token >= _EXPLAINED * excess:
        return Cause.IMBALANCE
    return Cause.COMPUTE
