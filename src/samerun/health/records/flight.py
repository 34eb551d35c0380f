"""The flight recorder: the last windows and what every thread is doing, for the moment when something goes wrong.

Bounded memory (CAPACITY records), no file until it is dumped. A dump never raises: it is made when a run crashes,
hangs or is told to stop, and the disk may be the reason.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from samerun.core.clock import Clock, SystemClock
from samerun.health.records.event import FIELDS, WindowRecord

SCHEMA: Final = "samerun.flight.v1"
CAPACITY: Final = 256


class FlightRecorder:
    """`phase` is what this rank is doing now, in words; whoever runs the loop keeps it up to date."""

    def __init__(self, *, capacity: int = CAPACITY, clock: Clock | None = None) -> None:
        self._records: deque[WindowRecord] = deque(maxlen=capacity)
        self._clock = clock or SystemClock()
        self.phase = "start"

    @property
    def records(self) -> list[WindowRecord]:
        return list(self._records)

    def add(self, record: WindowRecord) -> None:
        self._records.append(record)

    def dump(self, path: Path, *, reason: str, facts: Mapping[str, Any] | None = None) -> str | None:
        """Writes one JSON document to `path`, replacing an earlier dump. Returns None, or why that failed."""
        document = {
            "schema": SCHEMA,
            "reason": reason,
            "phase": self.phase,
            "time": round(self._clock.wall_seconds(), 3),
            "fields": list(FIELDS),
            "records": [json.loads(record.to_line()) for record in list(self._records)],
            "stacks": stacks(),
            **(facts or {}),
        }
        aside = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(document))
            os.replace(aside, path)  # noqa: PTH105  # atomic: a reader sees the old dump or the new one
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        return None


def stacks() -> dict[str, list[str]]:
    """Thread name → its frames as `file:line function`, outermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'thread')} ({ident})": [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(top)
        ]
        for ident, top in sys._current_frames().items()
    }
