"""Reading a box out of a stored chunk: only the blocks it touches, in bounded memory, every byte verified first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from samerun.format.layout import Box

if TYPE_CHECKING:
    from samerun.format.blocks import BlockReader

SPAN_BYTES: Final = 32 * 2**20
"""The most that is held at once besides the block cache."""


def read_box(blocks: BlockReader, start: int, chunk_shape: Sequence[int], box: Box, target: torch.Tensor) -> None:
    """Copies the elements `box` (counted within a chunk that starts at byte `start`) into `target`.

    `target` has the shape of the box and an integer dtype of the element's size. The box is cut into spans of the
    file of at most SPAN_BYTES; where rows lie more than a block apart, row by row, so the gaps are not read.
    """
    strides = [math.prod(chunk_shape[d + 1 :]) for d in range(len(chunk_shape))]
    _read(blocks, start, strides, box, target)


def _read(blocks: BlockReader, start: int, strides: list[int], box: Box, target: torch.Tensor) -> None:
    item = target.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(box.lengths, strides, strict=True))
    axis = next((d for d, n in enumerate(box.lengths) if n > 1), None)
    if axis is not None:
        row = 1 + sum((n - 1) * s for n, s in zip(box.lengths[axis + 1 :], strides[axis + 1 :], strict=True))
        gap_bytes = (strides[axis] - row) * item
        fitting = max(1, SPAN_BYTES // (strides[axis] * item))
        rows = 1 if gap_bytes >= blocks.block_bytes else fitting
        if rows < box.lengths[axis] and (gap_bytes >= blocks.block_bytes or span * item > SPAN_BYTES):
            for first in range(0, box.lengths[axis], rows):
                count = min(rows, box.lengths[axis] - first)
                part = Box(_with(box.offsets, axis, box.offsets[axis] + first), _with(box.lengths, axis, count))
                _read(blocks, start, strides, part, target.narrow(axis, first, count))
            return
    first_element = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    buffer = torch.empty(span, dtype=target.dtype)
    blocks.read_into(start + first_element * item, buffer.view(torch.uint8).numpy().data)
    target.copy_(buffer.as_strided(box.lengths, strides))


def _with(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
