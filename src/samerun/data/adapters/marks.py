"""Places that a source can be brought back to, and enough of them that the committed position is always reachable.

A snapshot taken every `every` items stands at an item number. What is committed lags behind what was delivered, so the
greatest snapshot at or before the committed item must still be there: with prefetch p per worker, w workers, a loop
that may be `ahead` items in front of its last commit and n items a window,

    capacity ≥ ceil((p·w + ahead + n) / every) + 1

which is settled when the ring is made, not when it is too late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from samerun.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place that a source can be brought back to: before item `item` of `epoch`."""

    epoch: int = 0
    item: int = 0
    snapshot: Any = None
    """The source's own state as JSON; None means the beginning of the epoch (item 0)."""


def capacity_for(*, prefetch: int, workers: int, ahead: int, window: int, every: int) -> int:
    """Snapshots needed so that none is dropped before what it stands for is committed."""
    return -(-(prefetch * workers + ahead + window) // every) + 1


class SnapshotRing:
    """Marks in the order of their item numbers; the oldest one needed is always kept."""

    def __init__(self, *, capacity: int, item: int, mark: Mark) -> None:
        if capacity < 2:
            raise UsageError(f"a snapshot ring of {capacity} cannot hold the last commit and a newer one; use >= 2")
        self._capacity = capacity
        self._held: deque[tuple[int, Mark]] = deque([(item, mark)])
        self._committed = item

    @property
    def newest(self) -> int:
        """Item number of the newest mark."""
        return self._held[-1][0]

    def push(self, item: int, mark: Mark) -> None:
        """A mark that stands before item `item`. Raises UsageError when nothing was committed for too long."""
        assert item > self.newest, (item, self.newest)
        if len(self._held) >= self._capacity:
            raise UsageError(
                f"{len(self._held)} snapshots are waiting: item {item} was reached and only {self._committed} are "
                "committed; commit each window before going on"
            )
        self._held.append((item, mark))

    def commit(self, item: int) -> None:
        """Items below `item` are decided; marks that are no longer needed go."""
        assert item >= self._committed, (item, self._committed)
        self._committed = item
        while len(self._held) > 1 and self._held[1][0] <= item:
            self._held.popleft()

    @property
    def resume(self) -> tuple[Mark, int]:
        """The mark to stand at, and how many items to read and drop after it to be at the committed one."""
        item, mark = self._held[0]
        return mark, self._committed - item

    def __len__(self) -> int:
        return len(self._held)
