"""Lines to a file, off the training's path: `write` only puts into a queue; one thread of its own does the rest.

Whatever the disk does, training goes on: a write that fails (full disk, lost mount) loses its lines, counts them, and
is tried again with the next ones. `problem` says what went wrong last; whoever owns the writer tells it once.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

MAX_PENDING: Final = 4096
"""Lines in memory at most, about 1.2 MB; beyond that new ones are dropped and counted."""
_CLOSE_SECONDS: Final = 5.0
_BATCH_LINES: Final = 256

Append = Callable[[int, bytes], int]


class RecordWriter:
    """Appends lines to `path`, which begins with `head`. The thread starts at the first line and is a daemon."""

    def __init__(
        self, path: Path, *, head: bytes = b"", append: Append = os.write, max_pending: int = MAX_PENDING
    ) -> None:
        self._path = path
        self._head = head
        self._append = append
        self._queue: queue.Queue[bytes | None] = queue.Queue(max_pending)
        self._thread: threading.Thread | None = None
        self._descriptor: int | None = None
        self._is_torn = False
        self.num_dropped = 0
        self.problem: str | None = None
        """What the last failed write died of; None while all went well."""

    def write(self, line: bytes) -> None:
        """Never blocks and never raises for the disk's sake."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="samerun-records", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1
            self.problem = f"{self._queue.maxsize} records wait for a disk that does not take them"

    def close(self, *, seconds: float = _CLOSE_SECONDS) -> bool:
        """Writes what waits, for at most `seconds`. False when the disk took longer: the rest is lost."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            return False
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = [self._queue.get()]
            while len(lines) < _BATCH_LINES and not self._queue.empty():
                lines.append(self._queue.get_nowait())
            ended = lines[-1] is None or None in lines
            self._put([line for line in lines if line is not None])
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _put(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            if self._descriptor is None:
                self._descriptor = self._opened()
            data = (b"\n" if self._is_torn else b"") + b"".join(lines)
            written = self._append(self._descriptor, data)
            self._is_torn = written < len(data)
            if self._is_torn:  # the disk filled up in the middle of a line: the next one must begin on its own
                self.num_dropped += data[written:].count(b"\n")
                self.problem = f"{self._path}: only {written} of {len(data)} bytes were written"
        except OSError as error:
            self.num_dropped += len(lines)
            self.problem = f"{self._path}: {error.strerror or error}"

    def _opened(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.fstat(descriptor).st_size == 0 and self._head:
            os.write(descriptor, self._head)
        return descriptor
