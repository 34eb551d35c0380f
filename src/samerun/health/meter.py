"""Where a window's time goes, from the points that the window passes anyway. One clock, one process.

    handed out ──────── own work, waits for data ────────► last backward ──── peers, step ────► decided

Up to the last backward of a window nothing waits for peers under DDP (gradient sync is off until then) but the
broadcast of buffers at the beginning of a forward: a rank that hands them to a late one waits there, and `BufferSync`
times it. That span less both waits is a rank's own work. What follows holds the last microbatch's own backward too: a
rank that is slow there alone cannot be told from its peers. Sharded models wait in every forward: own work is then not
known (0).
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
        self._peers = 0.0
        self._num = 0

    def begin(self) -> None:
        self._begun = self._clock.monotonic_seconds()
        self._last = None
        self._data = 0.0
        self._peers = 0.0
        self._num = 0
        if self._span is not None:
            self._span.begin()

    def at(self, point: str) -> None:
        """The first of the window's last backwards counts: with several optimizers each has one."""
        if point.endswith(LAST_BACKWARD) and self._last is None:
            self._last = self._clock.monotonic_seconds()
            if self._span is not None:
                self._span.mark()

    def peers(self, seconds: float) -> None:
        """So much of the window, before its last backward, was a wait for peers."""
        self._peers += seconds

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
                if self._last is None:  # asking for one more, in vain, is no wait for data: it ends the window
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
        compute = max(0.0, own - self._data - self._peers)
        return Times(window=window, compute=compute, wait=wait + self._peers, data=self._data, microbatches=self._num)


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


class BufferSync:
    """Times what DDP does between the call of its forward and that of the model inside: it broadcasts buffers there."""

    def __init__(self, meter: Meter, clock: Clock | None = None) -> None:
        self._meter = meter
        self._clock = clock or SystemClock()
        self._entered: float | None = None
        self._handles: list[Any] = []

    def watch(self, model: Any) -> None:
        """`model` is DDP around another one. Nothing is hooked where no buffers are broadcast."""
        if getattr(model, "broadcast_buffers", False) and next(iter(model.module.buffers()), None) is not None:
            self._handles += [
                model.register_forward_pre_hook(_Passed(self._enter)),
                model.module.register_forward_pre_hook(_Passed(self._leave)),
            ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self) -> None:
        self._entered = self._clock.monotonic_seconds()

    def _leave(self) -> None:
        if self._entered is not None:
            self._meter.peers(self._clock.monotonic_seconds() - self._entered)
            self._entered = None


class _Passed:
    """A hook that survives a copy of the model without copying what it calls."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, module: Any, inputs: Any) -> None:
        self._call()

    def __deepcopy__(self, _: Any) -> _Passed:
        return self
