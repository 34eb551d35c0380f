"""From a position in the global order to the microbatches of a window: pure arithmetic, the same on every rank.

A window takes the next `global_batch` positions that no skip range covers; microbatch k takes positions
[k·m, (k+1)·m) of those, the last one fewer when m does not divide the batch. What microbatch k holds never depends on
the number of replicas; only who runs it does (k = j·D + r).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from samerun.core.choice import Choice
from samerun.data.coverage import fingerprints
from samerun.data.order import MAX_SAMPLES, Int64Array, Order
from samerun.data.source import Replica
from samerun.errors import UsageError


class EpochEnd(Choice):
    """What a window does where an epoch ends inside it."""

    STRADDLE = "straddle"
    """It takes its last samples from the next epoch. The order does not depend on the batch."""
    DROP_TAIL = "drop_tail"
    """Epochs are cut to a whole number of windows: N mod B samples of each are not seen, recorded in the state."""


@dataclass(frozen=True, slots=True)
class SkipRanges:
    """Disjoint, sorted ranges [start, stop) of positions that training passes over."""

    ranges: tuple[tuple[int, int], ...] = ()

    def kept_before(self, position: int) -> int:
        """How many positions below `position` are not skipped."""
        return position - sum(min(stop, position) - start for start, stop in self.ranges if start < position)

    def positions(self, kept: Int64Array) -> Int64Array:
        """The positions of the kept-th positions that are not skipped; the inverse of `kept_before`."""
        if not self.ranges:
            return kept
        lengths = np.array([0, *(stop - start for start, stop in self.ranges)], np.int64).cumsum()
        kept_at_start = np.array([start for start, _ in self.ranges], np.int64) - lengths[:-1]
        shift: Int64Array = lengths[np.searchsorted(kept_at_start, kept, side="right")]
        return kept + shift

    def before(self, position: int) -> tuple[tuple[int, int], ...]:
        """The ranges cut to [0, position)."""
        return tuple((start, min(stop, position)) for start, stop in self.ranges if start < position)

    def merged(self, other: SkipRanges) -> SkipRanges:
        joined: list[tuple[int, int]] = []
        for start, stop in sorted((*self.ranges, *other.ranges)):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        return SkipRanges(tuple(joined))


def parse_skip(ranges: Iterable[Any]) -> SkipRanges:
    """Pairs (start, stop) of positions as SkipRanges; raises UsageError for overlaps, empty or negative ranges."""
    pairs: list[tuple[int, int]] = []
    if not isinstance(ranges, Iterable):
        raise UsageError(f"skip={ranges!r} is no list of ranges; write [(start, stop), …]")
    for item in ranges:
        try:
            start, stop = (operator.index(bound) for bound in item)
        except (TypeError, ValueError) as error:
            raise UsageError(f"skip range {item!r} is not a pair of whole numbers; write (start, stop)") from error
        if not 0 <= start < stop <= MAX_SAMPLES:
            raise UsageError(f"skip range ({start}, {stop}) is empty or negative; write 0 <= start < stop")
        pairs.append((start, stop))
    pairs.sort()
    for (a, b), (c, d) in pairwise(pairs):
        if c < b:
            raise UsageError(f"skip ranges ({a}, {b}) and ({c}, {d}) overlap; write one range ({a}, {max(b, d)})")
    return SkipRanges().merged(SkipRanges(tuple(pairs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """What to fetch for one microbatch. Travels to workers."""

    window: int
    number: int
    position: int
    """Of the first sample, in the global order: the key of everything random about the microbatch as a whole."""
    end: int
    """Behind the last one."""
    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowPlan:
    """One window, looked up: position, epoch and sample id of each of its samples, over all replicas."""

    index: int
    start: int
    end: int
    micro_batch: int
    positions: Int64Array
    epochs: Int64Array
    samples: Int64Array
    coverage: int

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def num_microbatches(self) -> int:
        return -(-len(self.samples) // self.micro_batch)

    def microbatch(self, number: int) -> MicroBatchPlan:
        part = slice(number * self.micro_batch, (number + 1) * self.micro_batch)
        positions = self.positions[part].tolist()
        return MicroBatchPlan(
            window=self.index,
            number=number,
            position=positions[0],
            end=positions[-1] + 1,
            samples=tuple(zip(self.epochs[part].tolist(), self.samples[part].tolist(), strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Windowing:
    """How the global order is cut into windows. Invalid sizes raise UsageError at construction."""

    order: Order
    global_batch: int
    micro_batch: int
    epoch_end: EpochEnd = EpochEnd.STRADDLE
    skip: SkipRanges = SkipRanges()

    def __post_init__(self) -> None:
        num_samples, batch = self.order.num_samples, self.global_batch
        for name, value in (("global_batch", batch), ("micro_batch", self.micro_batch)):
            if value < 1:
                raise UsageError(f"{name}={value}: at least 1 sample is needed")
        if self.micro_batch > batch:
            raise UsageError(
                f"micro_batch={self.micro_batch} is larger than global_batch={batch}; a window is one or more whole "
                f"microbatches: lower micro_batch to at most {batch}"
            )
        if self.epoch_end is EpochEnd.DROP_TAIL:
            if batch > num_samples:
                raise UsageError(
                    f"epoch_end='drop_tail' with global_batch={batch} and only {num_samples} samples leaves nothing; "
                    "use epoch_end='straddle' or a smaller batch"
                )
            for start, stop in self.skip.ranges:
                if start % batch or stop % batch:
                    raise UsageError(
                        f"skip range ({start}, {stop}) cuts a window: with epoch_end='drop_tail' its bounds must be "
                        f"multiples of global_batch={batch}"
                    )

    @property
    def samples_per_epoch(self) -> int:
        num_samples = self.order.num_samples
        return num_samples - (num_samples % self.global_batch if self.epoch_end is EpochEnd.DROP_TAIL else 0)

    @property
    def num_microbatches(self) -> int:
        return -(-self.global_batch // self.micro_batch)

    def window(self, *, index: int, start: int) -> WindowPlan:
        """The window that begins at position `start`. O(global_batch), wherever `start` is."""
        return self.windows(index=index, start=start, count=1)[0]

    def windows(self, *, index: int, start: int, count: int) -> list[WindowPlan]:
        """`count` windows in a row, looked up at once: most of the time of a small one is not spent on its samples."""
        first, size = self.skip.kept_before(start), self.global_batch
        positions = self.skip.positions(np.arange(first, first + count * size, dtype=np.int64))
        epochs, offsets = np.divmod(positions, self.samples_per_epoch)
        samples = self.order.lookup(epochs, offsets)
        prints = fingerprints(epochs, samples).reshape(count, size).sum(axis=1, dtype=np.uint64).tolist()
        plans: list[WindowPlan] = []
        for number, coverage in enumerate(prints):
            part = slice(number * size, (number + 1) * size)
            end = int(positions[part.stop - 1]) + 1
            plans.append(
                WindowPlan(
                    index=index + number,
                    start=start,
                    end=end,
                    micro_batch=self.micro_batch,
                    positions=positions[part],
                    epochs=epochs[part],
                    samples=samples[part],
                    coverage=coverage,
                )
            )
            start = end
        return plans

    def check_replica(self, replica: Replica) -> None:
        """Raises UsageError when some replica would get no microbatch in a window."""
        needed = self.micro_batch * replica.count
        if self.global_batch < needed:
            raise UsageError(
                f"global_batch={self.global_batch} is less than micro_batch·replicas = {self.micro_batch}·"
                f"{replica.count} = {needed}: some replica would get nothing. Use global_batch >= {needed}, "
                f"micro_batch <= {max(1, self.global_batch // replica.count)}, or fewer replicas"
            )
