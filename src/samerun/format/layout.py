"""Boxes: which part of a tensor a chunk is, how regular grids cut a tensor, and proof that chunks cover it exactly.

A grid cuts dimension d of size s into g pieces of ceil(s / g), the last ones shorter or empty: the rule of
`torch.chunk`, which DTensor's `Shard` follows. It says where every chunk of every tensor lies in a few numbers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samerun.errors import DamagedError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements `offsets[d] ≤ i < offsets[d] + lengths[d]` of a tensor; `Box((), ())` is a scalar."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.lengths)

    def meet(self, other: Box) -> Box | None:
        """The common part, or None when there is none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True)
        )
        if any(end <= start for start, end in zip(offsets, ends, strict=True)):
            return None
        return Box(offsets, tuple(end - start for start, end in zip(offsets, ends, strict=True)))

    def within(self, outer: Box) -> Box:
        """The same elements counted from the start of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.lengths, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def piece(size: int, pieces: int, index: int) -> tuple[int, int]:
    """(offset, length) of one of `pieces` pieces of a dimension."""
    step = -(-size // pieces)
    start = min(index * step, size)
    return start, min(start + step, size) - start


def grid_box(shape: Sequence[int], grid: Sequence[int], position: int) -> Box:
    """The box at `position` (row-major) of a grid; `grid` has one number per dimension."""
    spans = []
    for size, pieces in zip(reversed(shape), reversed(grid), strict=True):
        position, index = divmod(position, pieces)
        spans.append(piece(size, pieces, index))
    spans.reverse()
    return Box(tuple(start for start, _ in spans), tuple(length for _, length in spans))


def grid_positions(shape: Sequence[int], grid: Sequence[int], target: Box) -> Iterator[int]:
    """The positions of the grid whose boxes meet `target`, without looking at the others."""
    ranges = []
    for size, pieces, start, length in zip(shape, grid, target.offsets, target.lengths, strict=True):
        if length <= 0:
            return
        step = -(-size // pieces)
        ranges.append(range(start // step, min(pieces, -(-(start + length) // step))))
    for indices in itertools.product(*ranges):
        position = 0
        for index, pieces in zip(indices, grid, strict=True):
            position = position * pieces + index
        yield position


def prove_partition(shape: Sequence[int], boxes: Sequence[Box], *, where: str) -> None:
    """Raises DamagedError unless `boxes` cover the tensor: every element exactly once.

    Equal volumes and no two boxes that meet are together the proof. Boxes are swept along the dimension where they
    start at the most different places, so the usual shardings cost n·log n.
    """
    outer = whole(shape)
    for box in boxes:
        if len(box.offsets) != len(outer.offsets) or (box.volume and box.meet(outer) != box):
            raise DamagedError(f"{where}: the chunk {box} does not lie in a tensor of shape {list(shape)}")
    covered = sum(box.volume for box in boxes)
    if covered != outer.volume:
        raise DamagedError(f"{where}: chunks hold {covered} elements, the tensor of shape {list(shape)} {outer.volume}")
    meeting = _first_overlap([box for box in boxes if box.volume])
    if meeting is not None:
        raise DamagedError(f"{where}: the chunks {meeting[0]} and {meeting[1]} overlap")


def _first_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    if len(boxes) < 2:
        return None
    if not boxes[0].offsets:
        return boxes[0], boxes[1]
    axis = max(range(len(boxes[0].offsets)), key=lambda d: len({box.offsets[d] for box in boxes}))
    open_boxes: list[tuple[int, Box]] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        while open_boxes and open_boxes[0][0] <= box.offsets[axis]:
            heapq.heappop(open_boxes)
        for _, other in open_boxes:
            if box.meet(other) is not None:
                return other, box
        heapq.heappush(open_boxes, (box.offsets[axis] + box.lengths[axis], box))
    return None
