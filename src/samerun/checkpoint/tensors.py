"""What this rank holds of each tensor: its dtype, its global shape, how it is cut over ranks, and the local pieces.

A description says nothing that only one rank knows, wherever possible: ranks of one mesh then describe all their
tensors with the same bytes, and one digest replaces the exchange of every chunk of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from samerun.errors import UsageError
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.layout import Box, grid_box, whole

_CARRIER: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Elements are moved as integers of their size: exact for every dtype, also those that torch can hardly copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """A tensor of which this rank holds the pieces in `parts`; other ranks hold the rest, in any cut.

    For shardings that are no DTensor. Usable wherever a component captures or restores a tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Mapping[Box, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One tensor as this rank describes it. `cut` is JSON and has one of three forms:

    `{"whole": true}`: every rank that describes it holds all of it;
    `{"mesh": ranks, "shape": mesh shape, "dims": [tensor dimension that each mesh dimension cuts, or null]}`;
    `{"parts": [[offsets, lengths], …]}`: what this rank alone holds.
    """

    dtype: str
    shape: tuple[int, ...]
    cut: dict[str, Any]
    parts: tuple[tuple[Box, torch.Tensor], ...]


def held(tensor: torch.Tensor | Slices, path: str) -> Held:
    """What this rank holds of `tensor`; UsageError naming `path` for what cannot be stored."""
    if isinstance(tensor, Slices):
        cut: dict[str, Any] = {"parts": [[box.offsets, box.lengths] for box in sorted(tensor.parts)]}
        parts = tuple(sorted(tensor.parts.items(), key=lambda item: item[0]))
        return Held(dtype=dtype_name(tensor.dtype, path), shape=tensor.shape, cut=cut, parts=parts)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return _held_dtensor(tensor, shape, path)
    _check_storable(tensor, path)
    parts = ((whole(shape), tensor.detach()),)
    return Held(dtype=dtype_name(tensor.dtype, path), shape=shape, cut={"whole": True}, parts=parts)


def dtype_name(dtype: torch.dtype, path: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES or ITEM_BYTES[name] != dtype.itemsize:
        raise UsageError(f"{path}: tensors of {dtype} cannot be stored; dequantize it, or store its parts")
    return name


def dtype_named(name: str, path: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if name in ITEM_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{path}: this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory seen as plain elements of the same size, for exact copies."""
    return tensor.detach().view(_CARRIER[tensor.dtype.itemsize])


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order as bytes in host memory; copies only what is not there already."""
    flat = as_carrier(tensor).to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _held_dtensor(tensor: DTensor, shape: tuple[int, ...], path: str) -> Held:
    mesh = tensor.device_mesh
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise UsageError(f"{path}: a DTensor with Partial placement has no value yet; redistribute it first")
    local = tensor.to_local().detach()
    _check_storable(local, path)
    name = dtype_name(tensor.dtype, path)
    coordinate = mesh.get_coordinate()
    dims = [p.dim % max(len(shape), 1) if type(p) is Shard else None for p in placements]
    cutting = [dim for dim in dims if dim is not None]
    if len(set(cutting)) == len(cutting) and all(type(p) in (Shard, Replicate) for p in placements):
        cut: dict[str, Any] = {"mesh": mesh.mesh.flatten().tolist(), "shape": list(mesh.mesh.shape), "dims": dims}
        if coordinate is None:
            return Held(dtype=name, shape=shape, cut=cut, parts=())
        box = _mesh_box(shape, dims, list(mesh.mesh.shape), list(coordinate))
        if box.lengths == tuple(local.shape):
            return Held(dtype=name, shape=shape, cut=cut, parts=((box, local),))
    if coordinate is None:
        return Held(dtype=name, shape=shape, cut={"parts": []}, parts=())
    chunks = [Box(tuple(c.offsets), tuple(c.sizes)) for c in tensor.__create_chunk_list__()]  # type: ignore[no-untyped-call]
    if len(chunks) != 1 or chunks[0].lengths != tuple(local.shape):
        raise UsageError(f"{path}: placements {placements} give this rank no single chunk; redistribute it first")
    parts = ((chunks[0], local),) if chunks[0].volume else ()
    return Held(dtype=name, shape=shape, cut={"parts": [[box.offsets, box.lengths] for box, _ in parts]}, parts=parts)


def _mesh_box(shape: tuple[int, ...], dims: list[int | None], mesh_shape: list[int], coordinate: list[int]) -> Box:
    grid, position = [1] * len(shape), 0
    index = [0] * len(shape)
    for dim, size, at in zip(dims, mesh_shape, coordinate, strict=True):
        if dim is not None:
            grid[dim], index[dim] = size, at
    for pieces, at in zip(grid, index, strict=True):
        position = position * pieces + at
    return grid_box(shape, grid, position)


def _check_storable(tensor: torch.Tensor, path: str) -> None:
    if tensor.layout is not torch.strided:
        raise UsageError(f"{path}: a {tensor.layout} tensor cannot be stored; store its indices and values")
    if tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else "meta"
        raise UsageError(f"{path}: a {kind} tensor has no bytes to store")
