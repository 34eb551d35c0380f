"""What a command prints, kept in a file that cannot grow without bound: the beginning, and the end once it is over."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

KEPT_BYTES: Final = 8 << 20
_TAIL_BYTES: Final = 64 << 10
_CHUNK_BYTES: Final = 64 << 10

OnBytes = Callable[[bytes], None]


class KeptOutput(threading.Thread):
    """Reads `stream` to its end. The log holds the first KEPT_BYTES and, of anything longer, the last lines."""

    def __init__(self, stream: IO[bytes], log: Path, on_bytes: OnBytes) -> None:
        super().__init__(name="output of a drilled command", daemon=True)
        self._stream = stream
        self._log = log
        self._on_bytes = on_bytes
        self.num_bytes = 0

    def run(self) -> None:
        tail = b""
        with self._stream, self._log.open("wb") as out:
            while data := self._read():
                self._on_bytes(data)
                room = max(0, KEPT_BYTES - self.num_bytes)
                self.num_bytes += len(data)
                out.write(data[:room])
                out.flush()
                tail = (tail + data[room:])[-_TAIL_BYTES:]
            if tail:
                left_out = self.num_bytes - KEPT_BYTES - len(tail)
                out.write(f"\n[{left_out} bytes of output were not kept]\n".encode() if left_out else b"")
                out.write(tail)

    def _read(self) -> bytes:
        try:
            return os.read(self._stream.fileno(), _CHUNK_BYTES)
        except (OSError, ValueError):  # closed from outside: whoever still held it is not ours to wait for
            return b""


class PatternWatch:
    """Whether a pattern has appeared in a line of the output so far. Fed by the reading thread."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern.encode())
        self._rest = b""
        self.has_matched = False

    def feed(self, data: bytes) -> None:
        if self.has_matched:
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines[-1][-_TAIL_BYTES:]
        self.has_matched = any(self._pattern.search(line) for line in lines)
