"""Waiting times taken apart, from durations alone: no two clocks are ever compared.

A symmetric collective (all-reduce, all-gather, reduce-scatter, barrier) ends everywhere together. With d[r], the time
rank r spent in it from arriving to its end:

    transfer   T = min d[r]        what the last to arrive saw: nobody waited for anything but the wire
    wait       w[r] = d[r] − T     how long r stood there for the last
    lateness   l[r] = max d − d[r] how much later than the first r came

Broadcast, scatter and point-to-point end at different moments: for them these figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    transfer: float
    waits: tuple[float, ...]
    lateness: tuple[float, ...]


def take_apart(durations: Sequence[float]) -> Parts:
    """Of one collective over at least one rank, or of the medians over an interval; any unit of time."""
    shortest, longest = min(durations), max(durations)
    return Parts(
        transfer=shortest,
        waits=tuple(duration - shortest for duration in durations),
        lateness=tuple(longest - duration for duration in durations),
    )
