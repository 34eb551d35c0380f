"""The run's journal: one event a line, one file an attempt, each line whole or absent.

A crash can cut the last line; `read_events` drops it. Decisions (start, stop, skip, refuse) are written before they
take effect.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from samerun.core.clock import Clock, SystemClock

_encode: Final = json.JSONEncoder(sort_keys=True).encode


class Journal:
    """Appends events to a file; opened at the first event. `None` as path: events go nowhere (ranks other than 0)."""

    def __init__(self, path: Path | None, *, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._descriptor: int | None = None

    def write(self, event: str, *, sync: bool = False, **values: Any) -> None:
        """One line. `sync` puts it on the disk before returning: for what must be known after a crash."""
        self._append(self._line(event, values))
        if sync:
            self.sync()

    def write_all(self, event: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """A line each, in one go; a line's own `time` stands for that of the call."""
        if lines:
            self._append(b"".join(self._line(event, values) for values in lines))

    def sync(self) -> None:
        """Returns when every line so far is on the disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, data: bytes) -> None:
        if self._path is None:
            return
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.write(self._descriptor, data) < len(data):  # the disk filled up in the middle of a line
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def _line(self, event: str, values: Mapping[str, Any]) -> bytes:
        line = {"event": event, "time": round(self._clock.wall_seconds(), 3), **values}
        return _encode(line).encode() + b"\n"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a journal file."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
