"""Where a window's time goes, from the points that the window passes anyway. One clock, one process.

    handed out ──────── own work, waits for data ────────► last backward ──── peers, step ────► decided

Up to the last backward of a window nothing waits for peers under DDP (gradient sync is off until then), so that span
less the waits for data is a rank's own work. What follows holds the last microbatch's own backward too: a rank that is
slow there alone cannot be told from its peers. Sharded models wait in every forward: own work is then not known (0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from samerun.core.clock import Clock, SystemClock

LAST_BACKWARD: Final = ".last_backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of one window, in seconds."""

    window: float
    compute: float
    wait: float
    data: float
    microbatches: int = 0
    """How many this rank had."""


class Span(Protocol):
    """A device's own clock for the same two spans, where the host only launches work."""

    def begin(self) -> None: ...

    def mark(self) -> None: ...

    def seconds(self) -> tuple[float, float] | None:
        """(begin to mark, mark to now), or None where there was no mark."""


class Meter:
    """`begin`, then `at(point)` and `waited` as the window goes on, then `end`."""

    def __init__(self, *, is_separable: bool = True, span: Span | None = None, clock: Clock | None = None) -> None:
        self._span = span
        self._is_separable = is_separable
        self._clock = clock or SystemClock()
        self._begun = 0.0
        self._last: float | None = None
        self._data = 0.0
        self._num = 0

    def begin(self) -> None:
        self._begun = self._clock.monotonic_seconds()
        self._last = None
        self._data = 0.0
        self._num = 0
        if self._span is not None:
            self._span.begin()

    def at(self, point: str) -> None:
        """The first of the window's last backwards counts: with several optimizers each has one."""
        if point.endswith(LAST_BACKWARD) and self._last is None:
            self._last = self._clock.monotonic_seconds()
            if self._span is not None:
                self._span.mark()

    def waited(self, iterate: Iterator[Any], enter: Callable[[str], None]) -> Iterator[Any]:
        """Yields from `iterate`, counting what each next item takes; `enter` is told when waiting begins and ends."""
        while True:
            enter("data")
            before = self._clock.monotonic_seconds()
            try:
                item = next(iterate)
            except StopIteration:
                return
            finally:
                self._data += self._clock.monotonic_seconds() - before
                enter("microbatch")
            self._num += 1
            yield item

    def end(self) -> Times:
        now = self._clock.monotonic_seconds()
        window = now - self._begun
        if not self._is_separable or self._last is None:
            return Times(
                window=window, compute=0.0, wait=max(0.0, window - self._data), data=self._data, microbatches=self._num
            )
        wait, own = now - self._last, self._last - self._begun
        if self._span is not None and (spans := self._span.seconds()) is not None:
            own, wait = spans
        compute = max(0.0, own - self._data)
        return Times(window=window, compute=compute, wait=wait, data=self._data, microbatches=self._num)


class TimedData:
    """A window's data that counts how long the loop waits for it; otherwise what it wraps."""

    def __init__(self, data: Any, meter: Meter, enter: Callable[[str], None]) -> None:
        self._data = data
        self._meter = meter
        self._enter = enter

    @property
    def num_microbatches(self) -> int:
        return int(self._data.num_microbatches)

    @property
    def slots(self) -> int:
        return int(self._data.slots)

    def __iter__(self) -> Iterator[Any]:
        return self._meter.waited(iter(self._data), self._enter)
