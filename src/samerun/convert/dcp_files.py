"""A directory of `torch.distributed.checkpoint` as one state: weights-only, coverage proven, nothing imported."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import torch

from samerun.checkpoint.tensors import dtype_named
from samerun.convert.dcp_records import Listing, SavedTensor, Span, read_listing
from samerun.convert.torch_file import decode
from samerun.errors import DamagedError
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.layout import prove_partition


def read_dcp(folder: Path) -> dict[str, Any]:
    """The nested state that was saved. DamagedError, SchemaError; every element of every tensor exactly once.

    DCP keeps no digests: bytes that changed on disk are noticed only where torch.save's own framing breaks.
    """
    listing = read_listing(folder)
    _bound(folder, listing)
    flat: dict[str, Any] = {key: _tensor(folder, key, saved) for key, saved in listing.tensors.items()}
    flat |= {
        key: decode(io.BytesIO(_bytes(folder, key, span)), f"{folder}: {key}") for key, span in listing.values.items()
    }
    return nested({key: (listing.paths.get(key, (key,)), value) for key, value in flat.items()}, where=str(folder))


def nested(leaves: dict[str, tuple[tuple[str | int, ...], Any]], *, where: str) -> dict[str, Any]:
    """The tree whose leaves lie at the given paths: text keys make dicts, ints make lists."""
    root: dict[Any, Any] = {}
    for key, (path, value) in leaves.items():
        table = root
        for part in path[:-1]:
            table = table.setdefault(part, _Branch())
            if not isinstance(table, _Branch):
                raise DamagedError(f"{where}: {key}: its path leads through another value")
        if not path or path[-1] in table:
            raise DamagedError(f"{where}: {key}: two values have its path")
        table[path[-1]] = value
    return {str(key): _shaped(value, where) for key, value in root.items()}


class _Branch(dict[Any, Any]):
    """A table of this tree, to tell it from a dict that is a value."""


def _shaped(value: Any, where: str) -> Any:
    if not isinstance(value, _Branch):
        return value
    if all(isinstance(key, int) for key in value):
        if sorted(value) != list(range(len(value))):
            raise DamagedError(f"{where}: a list has the places {sorted(value)[:5]}")
        return [_shaped(value[place], where) for place in sorted(value)]
    return {key: _shaped(item, where) for key, item in value.items()}


def _bound(folder: Path, listing: Listing) -> None:
    """What is claimed may not exceed what is there: nothing is allocated on a claim alone."""
    claimed = sum(math.prod(saved.shape) * ITEM_BYTES[saved.dtype] for saved in listing.tensors.values())
    there = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if claimed > there:
        raise DamagedError(f"{folder}: claims tensors of {claimed} bytes in files of {there}")


def _tensor(folder: Path, key: str, saved: SavedTensor) -> torch.Tensor:
    where = f"{folder}: {key}"
    prove_partition(saved.shape, [box for box, _ in saved.chunks], where=where)
    whole = torch.empty(saved.shape, dtype=dtype_named(saved.dtype, where))
    for box, span in saved.chunks:
        part = decode(io.BytesIO(_bytes(folder, key, span)), where)
        if not isinstance(part, torch.Tensor) or (part.dtype, tuple(part.shape)) != (whole.dtype, box.lengths):
            raise DamagedError(f"{where}: the chunk {box} is not what the metadata says")
        whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))] = part
    return whole


def _bytes(folder: Path, key: str, span: Span) -> bytes:
    path = folder / span.file
    if path.is_symlink() or not path.is_file():
        raise DamagedError(f"{path}: missing, or no regular file; {key} lies in it")
    with path.open("rb") as file:
        file.seek(span.start)
        data = file.read(min(span.num_bytes, path.stat().st_size))
    if len(data) != span.num_bytes:
        raise DamagedError(f"{path}: ends before byte {span.start + span.num_bytes}; {key} lies there")
    return data
