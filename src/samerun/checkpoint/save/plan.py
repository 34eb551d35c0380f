"""Who writes what: a pure function of what the ranks hold, so that every rank computes the same plan by itself.

Each chunk is written by exactly one of the ranks that hold it. Where there is a choice (replicas), the largest tensors
choose first and take the holders that have the least to write so far: the greedy rule for balanced loads, at most 4/3
of the best (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from samerun.errors import DamagedError, UsageError
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.layout import Box, grid_box, prove_partition
from samerun.format.schema import Layout, TensorEntry

Description = Mapping[str, tuple[str, Sequence[int], Mapping[str, Any]]]
"""`component/key` → (dtype, shape, cut); see tensors.Held for the forms of a cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A description and the ranks that gave it."""

    ranks: tuple[int, ...]
    description: Description


@dataclass(slots=True)
class SavePlan:
    """All tensors with their layouts, and how many chunks and bytes each rank is to write."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)
    num_chunks: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def boxes_of(self, path: str, rank: int) -> list[Box]:
        """The chunks of one tensor that `rank` writes; empty ones only when they are the whole tensor."""
        entry = self.tensors[path]
        layout = self.layouts[entry.layout]
        positions = [i for i, writer in enumerate(layout.ranks) if writer == rank]
        boxes = [layout_box(layout, entry.shape, position) for position in positions]
        return [box for box in boxes if box.volume or len(layout.ranks) == 1]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The chunks of a tensor and who holds each. With a grid, the n-th holders of all chunks are one replica."""

    grid: tuple[int, ...] | None
    boxes: tuple[Box, ...] | None
    holders: tuple[tuple[int, ...], ...]


_Claims = list[tuple[tuple[int, ...], Mapping[str, Any]]]
_Merged = tuple[str, tuple[int, ...], _Claims]
_Array = np.ndarray[Any, np.dtype[np.int64]]


def layout_box(layout: Layout, shape: Sequence[int], position: int) -> Box:
    """The chunk at `position` of a tensor that is cut by `layout`."""
    if layout.grid is not None:
        return grid_box(shape, layout.grid, position)
    assert layout.boxes is not None, "a layout has a grid or boxes"
    offsets, lengths = layout.boxes[position]
    return Box(offsets, lengths)


def plan_save(views: Iterable[View], num_ranks: int) -> SavePlan:
    """The plan for everything that the ranks hold. UsageError when they contradict each other or leave a gap."""
    plan = SavePlan()
    merged = _merge(views)
    known: dict[tuple[Any, ...], int] = {}
    choices: dict[tuple[Any, ...], _Choice] = {}
    sizes: dict[tuple[Any, ...], _Array] = {}
    loads = _Loads(num_ranks)
    for path in sorted(merged, key=lambda path: (-_total_bytes(merged[path]), path)):
        dtype, shape, claims = merged[path]
        choice = _choose(path, shape, claims, choices)
        cut = (choice.grid, choice.boxes, shape, ITEM_BYTES[dtype])
        if cut not in sizes:
            sizes[cut] = np.array(_chunk_bytes(choice, shape, ITEM_BYTES[dtype]), dtype=np.int64)
        ranks = _least_loaded(choice, loads)
        identity = (choice.grid, choice.boxes, ranks)
        if identity not in known:
            known[identity] = len(plan.layouts)
            plan.layouts.append(_layout(choice, ranks))
        plan.tensors[path] = TensorEntry(dtype, shape, known[identity])
        loads.add(ranks, sizes[cut])
    plan.num_chunks, plan.num_bytes = loads.num_chunks.tolist(), loads.num_bytes.tolist()
    return plan


class _Loads:
    """What each rank has to write so far. Arrays: a thousand ranks times a thousand tensors are planned at once."""

    def __init__(self, num_ranks: int) -> None:
        self.num_bytes: _Array = np.zeros(num_ranks, dtype=np.int64)
        self.num_chunks: _Array = np.zeros(num_ranks, dtype=np.int64)
        self._heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._indexes: dict[tuple[int, ...], _Array] = {}

    def add(self, ranks: tuple[int, ...], sizes: _Array) -> None:
        if ranks not in self._indexes:
            self._indexes[ranks] = np.array(ranks, dtype=np.int64)
        np.add.at(self.num_bytes, self._indexes[ranks], sizes)
        np.add.at(self.num_chunks, self._indexes[ranks], (sizes > 0) | (len(ranks) == 1))

    def least_of(self, holders: tuple[int, ...]) -> int:
        """The holder with the least load. Loads only grow, so a heap whose top is looked at anew stays right."""
        heap = self._heaps.get(holders)
        if heap is None:
            heap = self._heaps[holders] = [(int(self.num_bytes[rank]), rank) for rank in holders]
            heapq.heapify(heap)
        while heap[0][0] != self.num_bytes[heap[0][1]]:
            heapq.heapreplace(heap, (int(self.num_bytes[heap[0][1]]), heap[0][1]))
        return heap[0][1]

    def least_replica(self, holders: tuple[tuple[int, ...], ...]) -> int:
        """The replica (column of `holders`) whose busiest rank has the least load."""
        busiest = self.num_bytes[np.array(holders, dtype=np.int64)].max(axis=0)
        return int(busiest.argmin())


def _merge(views: Iterable[View]) -> dict[str, _Merged]:
    merged: dict[str, _Merged] = {}
    for view in views:
        for path, (dtype, shape, cut) in view.description.items():
            known = merged.setdefault(path, (dtype, tuple(shape), []))
            if known[:2] != (dtype, tuple(shape)):
                raise UsageError(
                    f"{path}: rank {view.ranks[0]} has {dtype} {list(shape)}, another rank {known[0]} "
                    f"{list(known[1])}; ranks must agree on a tensor, or capture it as one of their own (rank_tensors)"
                )
            known[2].append((view.ranks, cut))
    return merged


def _total_bytes(merged: _Merged) -> int:
    return math.prod(merged[1]) * ITEM_BYTES[merged[0]]


def _choose(path: str, shape: tuple[int, ...], claims: _Claims, cache: dict[tuple[Any, ...], _Choice]) -> _Choice:
    forms = {form for _, cut in claims for form in ("whole", "mesh", "parts") if form in cut}
    if len(forms) != 1:
        raise UsageError(f"{path}: ranks hold it in different ways ({', '.join(sorted(forms))}); shard it alike")
    form = forms.pop()
    if form == "parts":
        return _choose_parts(path, shape, claims)
    groups = tuple(holders for holders, _ in claims)
    key = (len(shape), groups, json.dumps([cut for _, cut in claims]) if form == "mesh" else "")
    if key not in cache:
        ranks = sorted({rank for holders in groups for rank in holders})
        cache[key] = _choose_mesh(path, shape, ranks, claims) if form == "mesh" else _choose_whole(shape, ranks)
    return cache[key]


def _choose_whole(shape: tuple[int, ...], ranks: list[int]) -> _Choice:
    return _Choice((1,) * len(shape), None, (tuple(ranks),))


def _choose_mesh(path: str, shape: tuple[int, ...], ranks: list[int], claims: _Claims) -> _Choice:
    cut = claims[0][1]
    if any(other != cut for _, other in claims) or not set(cut["mesh"]) <= set(ranks):
        raise UsageError(f"{path}: ranks {ranks} describe it on different meshes; shard it alike on all of them")
    grid = [1] * len(shape)
    for dim, size in zip(cut["dims"], cut["shape"], strict=True):
        if dim is not None:
            grid[dim] = size
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, at in zip(cut["mesh"], itertools.product(*map(range, cut["shape"])), strict=True):
        index = [0] * len(shape)
        for dim, i in zip(cut["dims"], at, strict=True):
            if dim is not None:
                index[dim] = i
        holders.setdefault(tuple(index), []).append(rank)
    return _Choice(tuple(grid), None, tuple(tuple(holders[index]) for index in sorted(holders)))


def _choose_parts(path: str, shape: tuple[int, ...], claims: _Claims) -> _Choice:
    holders: dict[Box, list[int]] = {}
    for ranks, cut in claims:
        for offsets, lengths in cut["parts"]:
            holders.setdefault(Box(tuple(offsets), tuple(lengths)), []).extend(ranks)
    boxes = tuple(sorted(box for box in holders if box.volume))
    try:
        prove_partition(shape, boxes, where=path)
    except DamagedError as error:
        raise UsageError(f"{error}; the ranks' pieces must make the whole tensor, each element once") from error
    if not boxes:
        return _choose_whole(shape, sorted({rank for ranks, _ in claims for rank in ranks}))
    return _Choice(None, boxes, tuple(tuple(sorted(holders[box])) for box in boxes))


def _chunk_bytes(choice: _Choice, shape: tuple[int, ...], item_bytes: int) -> list[int]:
    if choice.boxes is not None:
        return [box.volume * item_bytes for box in choice.boxes]
    assert choice.grid is not None, "a choice has a grid or boxes"
    return [grid_box(shape, choice.grid, i).volume * item_bytes for i in range(math.prod(choice.grid))]


def _least_loaded(choice: _Choice, loads: _Loads) -> tuple[int, ...]:
    """The rank that writes each chunk: with a grid one whole replica, else chunk by chunk."""
    if choice.grid is None or len(choice.holders) == 1:
        return tuple(loads.least_of(holders) for holders in choice.holders)
    if len(choice.holders[0]) == 1:
        return tuple(holders[0] for holders in choice.holders)
    best = loads.least_replica(choice.holders)
    return tuple(holders[best] for holders in choice.holders)


def _layout(choice: _Choice, ranks: tuple[int, ...]) -> Layout:
    boxes = None if choice.boxes is None else tuple((box.offsets, box.lengths) for box in choice.boxes)
    return Layout(ranks=ranks, grid=choice.grid, boxes=boxes)
