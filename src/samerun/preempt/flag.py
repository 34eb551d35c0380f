"""Signals become a flag and a time. The handler does nothing else (invariant 11).

The first SIGTERM or SIGINT asks for a stop at the next edge. A second SIGINT, a moment later, leaves at once with
KeyboardInterrupt: nothing is saved then, and the last checkpoint stays what it was. Under a launcher one Ctrl-C arrives
twice (the terminal's and the launcher's own), so a second one counts only after `REPEAT_SECONDS`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from samerun.core.clock import Clock, SystemClock

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS: Final = 1.0
_NOTICE: Final = b"samerun: stopping at the end of this window (Ctrl-C again leaves at once, without saving)\n"

_Handler = Callable[[int, FrameType | None], Any] | int | None


class StopFlag:
    """Installed while a run is open, in the main thread only; the handlers found are called too and put back."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._previous: dict[int, _Handler] = {}
        self.noticed_seconds: float | None = None
        """Monotonic time of the first signal; None while there was none."""
        self.signal_name: str | None = None

    @property
    def is_set(self) -> bool:
        return self.noticed_seconds is not None

    def install(self) -> bool:
        """True when signals are now watched; False outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return True

    def remove(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = self._clock.monotonic_seconds()
        if self.noticed_seconds is None:
            self.noticed_seconds = now
            self.signal_name = signal.Signals(number).name
            if number == signal.SIGINT:
                os.write(2, _NOTICE)
        elif number == signal.SIGINT and now - self.noticed_seconds >= REPEAT_SECONDS:
            raise KeyboardInterrupt
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
