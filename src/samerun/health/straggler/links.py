"""Links and probes: slow transfer apart from late ranks, and pairwise probes that need a second opinion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from samerun.health.spike.robust import median

SLOW_TRANSFER: Final = 1.3
_LATE: Final = 0.1
"""Arrivals count as together while the latest comes within a tenth of the transfer."""
_PROBE_RATIO: Final = 2.0
MIN_ROUNDS: Final = 2


def is_link_slow(transfer: float, baseline: float, lateness: Sequence[float]) -> bool:
    """Whether the wire is slow: transfer at least 1.3 times its baseline while everybody arrives together.

    With somebody late the transfer cannot be told from the waiting that other collectives caused: no verdict then.
    """
    return transfer >= SLOW_TRANSFER * baseline and max(lateness, default=0.0) <= _LATE * transfer


def slow_in_every_round(rounds: Sequence[Mapping[int, float]]) -> list[int]:
    """Nodes whose *best* time over all rounds of a pairwise probe is over twice the median of the best times.

    In each round nodes are paired anew, so that a fast partner clears a node that was slow because of the other one.
    One round accuses half of the innocent: with fewer than two nobody is named, and one more round can clear a node.
    """
    if len(rounds) < MIN_ROUNDS:
        return []
    best = {node: min(seen[node] for seen in rounds if node in seen) for node in rounds[0]}
    limit = _PROBE_RATIO * median(list(best.values())) if best else 0.0
    return [node for node, seconds in best.items() if seconds > limit]
