"""The head of a safetensors file, written before its bytes exist, so that a shard streams to storage in one pass.

Format: 8 bytes little-endian length of the header, the header (JSON: name → dtype, shape, data_offsets), then the
bytes without holes in the order of their offsets. We pad the header with spaces so that the data starts at a multiple
of 64, and put wider elements first, so that every tensor is aligned for whoever maps the file.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from samerun.errors import UsageError
from samerun.format.dtypes import ITEM_BYTES, safetensors_dtype

ALIGNMENT: Final = 64
MAX_HEADER_BYTES: Final = 100_000_000
"""What the reference reader accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardItem:
    """One tensor (or chunk) to be written: its name in the file, its dtype and its own shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def shard_header(items: Sequence[ShardItem], *, where: str) -> tuple[bytes, list[int]]:
    """(the file's first bytes, the first byte of each item in the file), for items written in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, []
    for item in items:
        if item.name in header:
            raise UsageError(f"{where}: two tensors would both be stored as {item.name!r}; rename one of them")
        header[item.name] = header_entry(item.dtype, item.shape, position)
        starts.append(position)
        position += item.num_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(f"{where}: {len(items)} tensors need a header of {len(text)} bytes; readers accept 100 MB")
    head = struct.pack("<Q", len(text)) + text
    return head, [len(head) + start for start in starts]


def header_entry(dtype: str, shape: tuple[int, ...], position: int) -> dict[str, Any]:
    """What the header says of one tensor whose bytes start at `position` of the data."""
    spelled = safetensors_dtype(dtype)
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    offsets = [position, position + num_bytes]
    return {"dtype": spelled or "U8", "shape": list(shape) if spelled else [num_bytes], "data_offsets": offsets}


def write_order(items: Sequence[ShardItem]) -> list[int]:
    """The order in which to write: widest elements first, otherwise as given."""
    return sorted(range(len(items)), key=lambda i: -ITEM_BYTES[items[i].dtype])
