"""Signals become a level and a time; nothing else happens until an edge (invariant 11).

Python runs a signal handler only between bytecodes, so a rank that sits in a collective would learn of a SIGTERM when
the collective ends: seconds later, when they matter most. The C-level wake-up descriptor is written at once, and a
thread that waits on it notes the time. The Python handler, when it comes, only calls the handlers found before.

A second SIGTERM shortens the time left. A SIGINT after any first signal leaves at once with KeyboardInterrupt, or,
where the main thread cannot hear it, by ending the process: nothing is saved then, and the last checkpoint stays what
it was. Under a launcher one Ctrl-C arrives twice (the terminal's and the launcher's own), so a repeat counts after
REPEAT_SECONDS.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

from samerun.core.clock import Clock, SystemClock

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""USR1 is what Slurm's --signal=USR1@seconds sends ahead of a time limit."""
REPEAT_SECONDS: Final = 1.0
HURRY_SECONDS: Final = 10.0
"""What a second SIGTERM leaves, if more was left."""
INTERRUPTED: Final = 130
_DEAF_SECONDS: Final = 3.0
_NOTICE: Final = b"samerun: stopping at the end of this window (Ctrl-C again leaves at once, without saving)\n"

_Handler = Callable[[int, FrameType | None], Any] | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why and when this process was told to stop."""

    reason: str
    noticed_seconds: float
    """Monotonic."""
    deadline_seconds: float | None
    """Monotonic; None where nobody said how long there is."""


class StopFlag:
    """What this process knows about having to stop. Written by threads, read at edges; the first reason stays."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._stop: Stop | None = None
        self._noticed = threading.Event()

    @property
    def is_set(self) -> bool:
        return self._stop is not None

    @property
    def stop(self) -> Stop | None:
        return self._stop

    def note(self, reason: str, *, seconds_left: float | None) -> None:
        """A notice. A later one can only bring the deadline nearer."""
        now = self._clock.monotonic_seconds()
        deadline = None if seconds_left is None else now + seconds_left
        with self._lock:
            if self._stop is None:
                self._stop = Stop(reason=reason, noticed_seconds=now, deadline_seconds=deadline)
            elif deadline is not None:
                before = self._stop.deadline_seconds
                nearer = deadline if before is None else min(before, deadline)
                self._stop = replace(self._stop, deadline_seconds=nearer)
        self._noticed.set()

    def wait(self, seconds: float) -> bool:
        """Blocks until there is a notice, or for so long; whether there is one."""
        return self._noticed.wait(seconds)

    def seconds_left(self) -> float | None:
        """Until the deadline, negative beyond it; None when there is none."""
        stop = self._stop
        if stop is None or stop.deadline_seconds is None:
            return None
        return stop.deadline_seconds - self._clock.monotonic_seconds()


class SignalWatch:
    """Turns signals into notices while it is installed. `warning_seconds` is what a SIGTERM or SIGUSR1 leaves."""

    def __init__(self, flag: StopFlag, *, warning_seconds: float | None, clock: Clock | None = None) -> None:
        self._flag = flag
        self._warning_seconds = warning_seconds
        self._clock = clock or SystemClock()
        self._previous: dict[int, _Handler] = {}
        self._first_seconds: float | None = None
        self._pipe: tuple[int, int] | None = None
        self._outer_wakeup = -1
        self._thread: threading.Thread | None = None
        self._leaver: threading.Thread | None = None
        self._leaving = threading.Event()
        self._left = threading.Event()

    def install(self) -> bool:
        """True when signals are now watched; False outside the main thread, where Python forbids it."""
        if threading.current_thread() is not threading.main_thread():
            return False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._pipe = (reader, writer)
        self._outer_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._watch, args=(reader,), name="samerun-signals", daemon=True)
        self._thread.start()
        return True

    def remove(self) -> None:
        """Puts back every handler and the wake-up descriptor that were found."""
        if self._pipe is None:
            return
        self._left.set()
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        signal.set_wakeup_fd(self._outer_wakeup)
        reader, writer = self._pipe
        os.close(writer)
        assert self._thread is not None
        self._thread.join()
        if self._leaver is not None:  # it ends now that this is left
            self._leaver.join()
        os.close(reader)
        self._pipe = None

    def _watch(self, reader: int) -> None:
        while data := os.read(reader, 64):
            for number in data:
                self._arrived(number)
            if self._outer_wakeup >= 0:
                os.write(self._outer_wakeup, data)

    def _arrived(self, number: int) -> None:
        if number not in SIGNALS:
            return
        name = signal.Signals(number).name
        repeated = self._is_repeated()
        if self._first_seconds is None:
            self._first_seconds = self._clock.monotonic_seconds()
            if number == signal.SIGINT:
                os.write(2, _NOTICE)
        if number == signal.SIGINT:
            self._flag.note(name, seconds_left=None)
            if repeated:
                self._leave_soon()
        else:
            self._flag.note(name, seconds_left=HURRY_SECONDS if repeated else self._warning_seconds)

    def _is_repeated(self) -> bool:
        first = self._first_seconds
        return first is not None and self._clock.monotonic_seconds() - first >= REPEAT_SECONDS

    def _leave_soon(self) -> None:
        """The handler raises KeyboardInterrupt as soon as the main thread hears; one that never does is ended."""
        self._leaving.set()
        if self._leaver is not None:
            return

        def end_if_deaf() -> None:
            if not self._left.wait(_DEAF_SECONDS):
                os._exit(INTERRUPTED)

        self._leaver = threading.Thread(target=end_if_deaf, name="samerun-leave", daemon=True)
        self._leaver.start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self._is_repeated() or self._leaving.is_set()):
            raise KeyboardInterrupt
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
