"""What it takes to leave a window in its middle as if it had never begun.

Gradients and buffers are the window's own to put back; progress, cursor, schedule and loss scale move only when a
window is decided. What is left are the random streams, kept here at the edge, and the user's own components, which
nobody could put back: they are compared with what they were at the edge, and where one has changed nothing is saved.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from samerun.core.canonical import sha256_hex
from samerun.core.component import Captured, Component
from samerun.health.corruption.checksum import Checksum, checksum
from samerun.preempt.votes import WORTH_SECONDS, Votes
from samerun.ranks.group import Group
from samerun.run.ending.stopping import Stopping
from samerun.state.rng import capture_rng, restore_rng

_LOOK_SECONDS: Final = 0.5

Mark = tuple[str, Mapping[str, Checksum]]


class Midwindow:
    """`votes`: None where ranks have no board to vote on; then every window is finished."""

    def __init__(self, votes: Votes | None, group: Group, own: Sequence[Component], stopping: Stopping) -> None:
        self._votes = votes
        self._group = group
        self._own = own
        self._stopping = stopping
        self._ended = threading.Event()
        self.is_open = False
        """Whether the window that has begun may be dropped in its middle."""
        self._is_worth_it = False
        self._num_edges = 0
        self._streams: dict[str | int, Any] = {}
        self._marks: dict[str, Mark] = {}

    def at_edge(self, window_seconds: float | None) -> None:
        """`window_seconds`: the longest window lately. Collective, at a few edges that their number alone chooses."""
        number, self._num_edges = self._num_edges, self._num_edges + 1
        if self._votes is not None and number == 0:
            threading.Thread(target=self._wait_for_notice, name="samerun-votes", daemon=True).start()
        if self._votes is None or number == 0 or number & (number - 1):
            return
        longest = max(seconds or 0.0 for seconds in self._group.gather(window_seconds))
        self._is_worth_it = longest >= WORTH_SECONDS

    def begin(self, window: int, num_shared: int) -> None:
        """A window is about to begin, of which every rank has `num_shared` microbatches."""
        self.is_open = self._is_worth_it
        if self._votes is not None and self.is_open:
            self._votes.begin(window, num_shared)
            self._streams = capture_rng()
            self._marks = {component.name: _mark(component.capture()) for component in self._own}

    def is_dropped_at(self, slot: int) -> bool:
        """Whether all ranks leave before microbatch `slot` of the open window. Not collective."""
        return self._votes is not None and self.is_open and self._votes.is_dropped_at(slot, self._stopping.must_drop)

    def noticed(self) -> None:
        """This rank was told to stop. Called by any thread."""
        if self._votes is not None and self.is_open and not self._ended.is_set():
            self._votes.noticed(self._stopping.must_drop)

    def close(self) -> None:
        """The thread that waits for a notice ends by itself soon, and does nothing any more."""
        self._ended.set()

    def decided(self) -> None:
        if self._votes is not None and self.is_open:
            self._votes.decided()
        self.is_open = False

    def put_back(self) -> list[str]:
        """The streams of the last edge; returns the user's components that are no longer what they were. Collective."""
        restore_rng(self._streams)
        mine = [component.name for component in self._own if _mark(component.capture()) != self._marks[component.name]]
        return sorted({name for names in self._group.gather(mine) for name in names})

    def _wait_for_notice(self) -> None:
        while not self._ended.is_set():
            if self._stopping.flag.wait(_LOOK_SECONDS):
                self.noticed()
                return


def _mark(captured: Captured) -> Mark:
    tensors = {**captured.tensors, **captured.rank_tensors}
    here = {key: tensor.to_local() if hasattr(tensor, "to_local") else tensor for key, tensor in tensors.items()}
    return sha256_hex(repr(captured.plain).encode()), {key: checksum(tensor) for key, tensor in here.items()}
