"""A person's own quarantine: samples that every start from now on passes over."""

from __future__ import annotations

from pathlib import Path

from samerun.core.clock import Clock, SystemClock
from samerun.health.rollback.decisions import DecisionRecord, write_decision
from samerun.storage.opening import open_storage


def quarantine(path: str | Path, start: int, stop: int, *, reason: str, clock: Clock | None = None) -> DecisionRecord:
    """Records, durably, that the run at `path` passes over positions [start, stop) of its global sample order.

    Positions of a window stand in its record (`start`, `end`). It takes effect at the run's next start, and at every
    one after that, whichever checkpoint that begins from; what was trained on already stays trained on. Raises
    UsageError for a range that is none.
    """
    return write_decision(
        open_storage(path),
        DecisionRecord(
            action="quarantine",
            reason=reason,
            attempt=0,
            window=0,
            time=round((clock or SystemClock()).wall_seconds(), 3),
            mode="operator",
            skip=(start, stop),
        ),
    )
