"""Leaving the open window in its middle: all ranks leave before the same microbatch, or none leaves.

Inside a window ranks are not in step, and any microbatch may hold collectives (FSDP2's, SyncBatchNorm's, the user's).
So no rank may leave alone, and none may wait for a vote that a peer in a collective cannot cast. At a few points of a
window, each before a microbatch that every rank has, each rank leaves a word on a board outside all collectives:

    PASS    from a rank that would go on
    DROP    from a rank that was told to stop and for which finishing the window no longer fits

The first word under a point's name stays, and decides there for everybody. A rank that wants to leave and finds PASS
leaves DROP at the next point that no peer has reached yet; so does, as soon as it is told, one that is between points.

Why no rank is left waiting: a word never changes, so all ranks do the same at each point, having passed the same points
before it; and a rank asks the board's server only, never a peer. After the last point the window is finished as usual.
Where the board cannot be reached a rank goes on as if there were none; a peer that had left by then finds nobody to
save with, and the last checkpoint stays.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from samerun.core.clock import Clock
from samerun.errors import PeerError
from samerun.preempt.budget import Slowest
from samerun.ranks.board import Board

PASS: Final = "pass"
DROP: Final = "drop"
MAX_POINTS: Final = 8
"""Votes in one window: each costs every rank a round trip to one server."""
WORTH_SECONDS: Final = 1.0
"""Windows that end sooner are always finished: nothing is gained by leaving them."""


def points(num_shared: int) -> range:
    """Microbatches before which there is a vote, of the `num_shared` that every rank has in a window."""
    return range(0, num_shared, max(1, -(-num_shared // MAX_POINTS)))


IsDropping = Callable[[float | None], bool]
"""Given the longest that the rest of a window took from here (None while unmeasured), whether this rank must leave."""


class Votes:
    """This rank's part. `begin` and `decided` surround each window that is voted in, on all ranks alike.

    `noticed` may be called by another thread than the rest.
    """

    def __init__(self, board: Board, clock: Clock, *, leads: bool, say: Callable[[str], None]) -> None:
        self._board = board
        self._clock = clock
        self._leads = leads
        self._say = say
        self._lock = threading.Lock()
        self._is_lost = False
        """The board could not be reached once: never asked again, since peers may have heard what this rank did not."""
        self._window = 0
        self._points = range(0)
        self._passed: dict[int, float] = {}
        self._left: defaultdict[int, Slowest] = defaultdict(Slowest)
        """By the number of points still to come, the one that was passed included."""

    def begin(self, window: int, num_shared: int) -> None:
        with self._lock:
            self._window, self._points, self._passed = window, points(0 if self._is_lost else num_shared), {}

    def is_dropped_at(self, slot: int, is_dropping: IsDropping) -> bool:
        """Whether all ranks leave before microbatch `slot`. Not collective; one round trip at a point, else nothing."""
        with self._lock:
            if slot not in self._points:
                return False
            self._passed[slot] = self._clock.monotonic_seconds()
            wish = DROP if is_dropping(self._left_from(slot)) else PASS
            try:
                word = self._board.first(self._name(slot), wish)
                if word == PASS and wish == DROP:
                    self._claim_after(slot)
            except PeerError as error:
                self._is_lost, self._points, self._passed = True, range(0), {}
                self._say(f"windows are finished before a stop from now on: {error}")
                return False
            return word == DROP

    def noticed(self, is_dropping: IsDropping) -> None:
        """This rank was told to stop, perhaps between two points: the next one that no peer has reached is claimed."""
        with self._lock:
            if not self._passed or not self._points:
                return
            slot, since = max(self._passed.items())
            left = self._left_from(slot)
            gone = self._clock.monotonic_seconds() - since
            if is_dropping(None if left is None else max(0.0, left - gone)):
                with contextlib.suppress(PeerError):  # the next point says so
                    self._claim_after(slot)

    def decided(self) -> None:
        """The window was decided by all ranks: each has passed every point, so the words are no longer needed."""
        now = self._clock.monotonic_seconds()
        with self._lock:
            for slot, since in self._passed.items():
                self._left[self._num_from(slot)].add(now - since)
            if self._leads:
                with contextlib.suppress(PeerError):  # the next point says so
                    for slot in self._points:
                        self._board.forget(self._name(slot))
            self._points, self._passed = range(0), {}

    def _left_from(self, slot: int) -> float | None:
        return self._left[self._num_from(slot)].seconds

    def _num_from(self, slot: int) -> int:
        return len(self._points) - self._points.index(slot)

    def _claim_after(self, slot: int) -> None:
        for later in self._points[self._points.index(slot) + 1 :]:
            if self._board.first(self._name(later), DROP) == DROP:
                return

    def _name(self, slot: int) -> str:
        return f"window-{self._window}.microbatch-{slot}"
