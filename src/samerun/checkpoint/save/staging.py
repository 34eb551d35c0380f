"""Copies of what is to be written, so that live tensors may change while the bytes travel.

One buffer per kind of device, reused from save to save: memory is taken once and never grows with the number of saves.
It is as large as what this rank writes of one checkpoint, pinned when the tensors come from an accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from samerun.checkpoint.save.stage import Piece
from samerun.checkpoint.tensors import as_carrier

_ALIGNMENT: Final = 64


class StagingBuffer:
    """Host memory for one save at a time: its owner sees to it that the last one is through before the next copies."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def copy(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """The same pieces with their tensors copied into the buffer; complete when it returns."""
        self._reserve(needed_bytes(pieces), pinned=any(piece.tensor.is_cuda for piece in pieces))
        position, copies, devices = 0, [], set()
        with torch.no_grad():
            for piece in pieces:
                source = as_carrier(piece.tensor)
                size = source.numel() * source.element_size()
                place = self._memory[position : position + size].view(source.dtype).view(source.shape)
                place.copy_(source, non_blocking=True)
                if source.is_cuda:
                    devices.add(source.device)
                copies.append(replace(piece, tensor=place))
                position += _aligned(size)
        for device in devices:
            torch.cuda.synchronize(device)
        return tuple(copies)

    def _reserve(self, num_bytes: int, *, pinned: bool) -> None:
        if self.num_bytes < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # give the old one back first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def needed_bytes(pieces: Sequence[Piece]) -> int:
    return sum(_aligned(piece.tensor.numel() * piece.tensor.element_size()) for piece in pieces)


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT
