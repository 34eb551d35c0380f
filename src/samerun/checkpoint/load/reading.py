"""Reading boxes of tensors out of stored chunks: only the blocks they touch, in bounded memory, every byte verified.

No torch: elements travel as NumPy arrays of integers of their size (16 bytes: complex128), exact for every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from samerun.checkpoint.save.plan import layout_box
from samerun.errors import DamagedError, MismatchError
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.layout import Box, grid_positions, whole

if TYPE_CHECKING:
    from samerun.checkpoint.load.opened import Checkpoint
    from samerun.format.blocks import BlockReader
    from samerun.format.schema import Chunk, Layout, RankTensor

SPAN_BYTES: Final = 16 * 2**20
"""The largest span; two are held for a moment, besides the block cache."""

CARRIERS: Final[dict[int, Any]] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
Part = tuple[Box, "np.ndarray[Any, Any]"]
"""A box, counted within what was asked for, and its elements."""


def read_shared(checkpoint: Checkpoint, component: str, key: str, wanted: Box) -> Iterator[Part]:
    """The elements `wanted` of a global tensor, part by part, each exactly once.

    Coverage is proven before the first byte is read: MismatchError. Bad bytes raise DamagedError.
    """
    path = f"{checkpoint.entry.name}: {component}/{key}"
    entry = checkpoint.manifest.components[component].tensors[key]
    layout = checkpoint.manifest.layouts[entry.layout]
    sources: list[tuple[int, Box, Box]] = []
    for position in _positions(layout, entry.shape, wanted):
        stored = layout_box(layout, entry.shape, position)
        common = stored.meet(wanted)
        if common is not None:
            sources.append((layout.ranks[position], stored, common))
    covered = sum(common.volume for _, _, common in sources)
    if covered != wanted.volume:
        raise MismatchError(f"{path}: chunks cover {covered} of the {wanted.volume} elements of {wanted}")
    item_bytes = ITEM_BYTES[entry.dtype]
    for rank, stored, common in sources:
        chunk = _chunk(checkpoint, rank, component, key, stored)
        end = chunk.start + stored.volume * item_bytes
        blocks = checkpoint.blocks(rank)
        if end > blocks.num_bytes:
            raise DamagedError(f"{path}: the chunk {stored} of rank {rank} ends at byte {end}, beyond its file")
        inner = common.within(wanted)
        for box, array in read_chunk(blocks, chunk.start, stored.lengths, common.within(stored), item_bytes):
            yield Box(tuple(map(sum, zip(inner.offsets, box.offsets, strict=True))), box.lengths), array


def read_own(checkpoint: Checkpoint, rank: int, tensor: RankTensor) -> Iterator[Part]:
    """All elements of a tensor of one rank's own."""
    outer = whole(tensor.shape)
    if outer.volume:
        yield from read_chunk(checkpoint.blocks(rank), tensor.start, tensor.shape, outer, ITEM_BYTES[tensor.dtype])


def read_chunk(
    blocks: BlockReader, start: int, chunk_shape: Sequence[int], box: Box, item_bytes: int
) -> Iterator[Part]:
    """The elements `box` (counted within a chunk that starts at byte `start`), counted from the start of `box`.

    The box is cut into spans of the file of at most SPAN_BYTES; where rows lie more than a block apart, row by row,
    so that the gaps between them are not read.
    """
    strides = [math.prod(chunk_shape[d + 1 :]) for d in range(len(chunk_shape))]
    for part in _cut(box, strides, item_bytes, blocks.block_bytes):
        span = _span(part.lengths, strides)
        first = sum(o * s for o, s in zip(part.offsets, strides, strict=True))
        buffer = np.empty(span, dtype=CARRIERS[item_bytes])
        blocks.read_into(start + first * item_bytes, buffer.view(np.uint8).data)
        byte_strides = [stride * item_bytes for stride in strides]
        yield part.within(box), np.lib.stride_tricks.as_strided(buffer, part.lengths, byte_strides)


def _cut(box: Box, strides: list[int], item_bytes: int, block_bytes: int) -> Iterator[Box]:
    axis = next((d for d, n in enumerate(box.lengths) if n > 1), None)
    if axis is None:
        yield box
        return
    row_bytes = strides[axis] * item_bytes
    gap_bytes = row_bytes - _span(box.lengths[axis + 1 :], strides[axis + 1 :]) * item_bytes
    is_sparse = gap_bytes >= block_bytes
    rows = 1 if is_sparse else max(1, SPAN_BYTES // row_bytes)
    if rows >= box.lengths[axis] or not (is_sparse or _span(box.lengths, strides) * item_bytes > SPAN_BYTES):
        yield box
        return
    for first in range(0, box.lengths[axis], rows):
        count = min(rows, box.lengths[axis] - first)
        offsets = _with(box.offsets, axis, box.offsets[axis] + first)
        yield from _cut(Box(offsets, _with(box.lengths, axis, count)), strides, item_bytes, block_bytes)


def _span(lengths: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first to the last of a box, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(lengths, strides, strict=True))


def _with(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _positions(layout: Layout, shape: tuple[int, ...], wanted: Box) -> Iterator[int]:
    if layout.grid is not None:
        return grid_positions(shape, layout.grid, wanted)
    assert layout.boxes is not None, "a layout has a grid or boxes"
    return iter(range(len(layout.boxes)))


def _chunk(checkpoint: Checkpoint, rank: int, component: str, key: str, stored: Box) -> Chunk:
    for chunk in checkpoint.index(rank).chunks.get(component, {}).get(key, ()):
        if (chunk.offsets, chunk.lengths) == (stored.offsets, stored.lengths):
            return chunk
    raise DamagedError(
        f"{checkpoint.entry.name}: {component}/{key}: the index of rank {rank} has no chunk {stored}, which the "
        f"manifest names"
    )
