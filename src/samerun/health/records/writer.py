"""Lines to a file, off the training's path: `write` only puts them aside; one thread of its own makes and writes them.

The thread looks once a second. To wake it for every line would cost a short window more than all else in here (0.8 ms
of CPU, most of it the two threads taking the interpreter from each other); a process that is killed loses the lines of
its last second.

Whatever the disk does, training goes on: a write that fails (full disk, lost mount) loses its lines, counts them, and
is tried again with the next ones. `problem` says what went wrong last; whoever owns the writer tells it once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

MAX_PENDING: Final = 4096
"""Lines in memory at most, about 1.2 MB; beyond that new ones are dropped and counted."""
_CLOSE_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 1.0

Append = Callable[[int, bytes], int]


class RecordWriter:
    """Appends lines to `path`, which begins with `head`. The thread starts at the first line and is a daemon."""

    def __init__(
        self, path: Path, *, head: bytes = b"", append: Append = os.write, max_pending: int = MAX_PENDING
    ) -> None:
        self._path = path
        self._head = head
        self._append = append
        self._max_pending = max_pending
        self._waiting: deque[Callable[[], bytes]] = deque()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._descriptor: int | None = None
        self._is_torn = False
        self.num_dropped = 0
        self.problem: str | None = None
        """What the last failed write died of; None while all went well."""

    def write(self, line: Callable[[], bytes]) -> None:
        """`line` is called on the writer's thread. Never blocks and never raises for the disk's or the line's sake."""
        if self._thread is None:
            self._ending.clear()
            self._thread = threading.Thread(target=self._run, name="samerun-records", daemon=True)
            self._thread.start()
        if len(self._waiting) >= self._max_pending:
            self.num_dropped += 1
            self.problem = f"{self._max_pending} records wait for a disk that does not take them"
            return
        self._waiting.append(line)

    def close(self, *, seconds: float = _CLOSE_SECONDS) -> bool:
        """Writes what waits, for at most `seconds`. False when the disk took longer: the rest is lost."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._ending.set()
        thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        while not self._ending.wait(_PAUSE_SECONDS):
            self._put(self._taken())
        self._put(self._taken())
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _taken(self) -> list[bytes]:
        lines = []
        for _ in range(len(self._waiting)):
            line = self._waiting.popleft()
            try:
                lines.append(line())
            except (TypeError, ValueError, OverflowError) as error:
                self.num_dropped += 1
                self.problem = f"{self._path}: a record cannot be written: {error!r}"
        return lines

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
