"""N ranks as N threads of one process: real blocking collectives without processes, for tests and simulations."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from samerun.errors import PeerError

T = TypeVar("T")


class ThreadGroup:
    """One rank's view of a world of threads. Values go through JSON, as they do between processes."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size

    def gather(self, value: Any, *, seconds: float | None = None) -> list[Any]:
        return [json.loads(text) for text in self._world.exchange(self.rank, json.dumps(value), seconds)]

    def broadcast(self, value: Any, *, seconds: float | None = None) -> Any:
        return self.gather(value if self.rank == 0 else None, seconds=seconds)[0]

    def barrier(self, *, seconds: float | None = None) -> None:
        self.gather(None, seconds=seconds)

    def close(self) -> None:
        return None


class _World:
    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[str] = [""] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, text: str, seconds: float | None) -> list[str]:
        try:
            self._slots[rank] = text
            self._barrier.wait(seconds)
            seen = list(self._slots)
            self._barrier.wait(seconds)
        except threading.BrokenBarrierError as error:
            raise PeerError(f"rank {rank}: a peer left or did not answer in time") from error
        return seen

    def abandon(self) -> None:
        self._barrier.abort()


def run_ranks(size: int, body: Callable[[ThreadGroup], T]) -> list[T]:
    """Runs `body` once per rank, each in a thread; a rank that raises releases the others with PeerError.

    Returns the results in rank order, or raises the first rank's own error (not the PeerErrors it caused).
    """
    world = _World(size)

    def one(rank: int) -> T:
        try:
            return body(ThreadGroup(world, rank))
        except BaseException:
            world.abandon()
            raise

    with ThreadPoolExecutor(max_workers=size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, PeerError):
            raise error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
