"""The few questions that ranks ask each other outside training. Values are JSON, never pickles.

Every call is a collective: all ranks make the same calls in the same order (invariant 9). Each has a time limit, after
which it raises PeerError; so does a peer that vanished.
"""

from __future__ import annotations

from typing import Any, Protocol


class Group(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any, *, seconds: float | None = None) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""

    def broadcast(self, value: Any, *, seconds: float | None = None) -> Any:
        """Rank 0's JSON value on every rank; the other ranks' argument is ignored."""

    def barrier(self, *, seconds: float | None = None) -> None: ...

    def close(self) -> None:
        """Ends the group on this rank; not collective. No call may follow."""


class Solo:
    """A world of one."""

    rank = 0
    size = 1

    def gather(self, value: Any, *, seconds: float | None = None) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, *, seconds: float | None = None) -> Any:
        return value

    def barrier(self, *, seconds: float | None = None) -> None:
        return None

    def close(self) -> None:
        return None
