"""DCP's metadata as a manifest of ckpt.v1, and back. The manifest is made only of what ranks prove to have written."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from samerun.checkpoint.save.plan import layout_box
from samerun.checkpoint.tensors import dtype_name, dtype_named
from samerun.errors import DamagedError, SchemaError, UsageError
from samerun.format.layout import Box, grid_box, prove_partition
from samerun.format.schema import (
    MANIFEST_SCHEMA,
    ComponentEntry,
    FileEntry,
    Layout,
    Manifest,
    ProgressEntry,
    TensorEntry,
)

if TYPE_CHECKING:
    from samerun.checkpoint.load.opened import Checkpoint

COMPONENT: Final = "state"
"""Everything that DCP saves is one component; its tensors are named by DCP's fully qualified names."""
FACT: Final = "dcp"
REPORT: Final = MetadataIndex("samerun.files")
"""The index of the one result per rank that stands for its files; a rank without items has only this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk that a rank says it wrote."""

    box: Box
    rank: int
    dtype: str


@dataclass(slots=True)
class Written:
    """What all ranks say they wrote: chunks by key, values by key → rank, files, and whose values hold tensors."""

    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    files: list[FileEntry] = field(default_factory=list)
    with_tensors: bool = False


def collect(name: str, results: Sequence[Sequence[Any]]) -> Written:
    """The results of all ranks in rank order; DamagedError when one reports another save, twice, or not at all."""
    written = Written()
    for rank, reported in enumerate(results):
        reports = [result.storage_data for result in reported if result.index == REPORT]
        if len(reports) != 1 or reports[0]["checkpoint"] != name:
            raise DamagedError(f"{name}: rank {rank} did not report its files of this save; nothing was published")
        written.files += [FileEntry(*entry) for entry in reports[0]["files"]]
        written.with_tensors |= reports[0]["with_tensors"]
        for result in reported:
            if result.index == REPORT:
                continue
            key, found = result.index.fqn, result.storage_data
            if found["dtype"] is not None:
                chunk = Chunk(box=Box(*map(tuple, found["box"])), rank=rank, dtype=found["dtype"])
                written.chunks.setdefault(key, []).append(chunk)
            elif key in written.values:
                raise DamagedError(f"{key}: written by rank {written.values[key]} and rank {rank}")
            else:
                written.values[key] = rank
    return written


def build_manifest(
    name: str, metadata: Metadata, written: Written, num_ranks: int, facts: Mapping[str, Any]
) -> Manifest:
    """The manifest, once the results are proven to be the plan: every chunk and value, once, of the planned dtype."""
    planned = metadata.state_dict_metadata
    for key in sorted({*written.chunks, *written.values} - set(planned)):
        raise DamagedError(f"{key}: was written, but the plan does not name it; nothing was published")
    layouts: dict[tuple[Any, ...], int] = {}
    tensors: dict[str, TensorEntry] = {}
    for key, entry in planned.items():
        if isinstance(entry, BytesStorageMetadata):
            if key not in written.values:
                raise DamagedError(f"{key}: planned, but no rank wrote it; nothing was published")
        else:
            tensors[key] = _tensor_entry(key, entry, written.chunks.get(key, []), layouts)
    return Manifest(
        schema=MANIFEST_SCHEMA,
        name=name,
        attempt=0,
        sequence=0,
        progress=ProgressEntry(windows=0, skipped=0, updates=0, samples=0, tokens=0),
        num_ranks=num_ranks,
        components={
            COMPONENT: ComponentEntry(
                plain="differ" if written.values else "none",
                rank_tensors="differ" if written.with_tensors else "none",
                tensors=tensors,
            )
        },
        layouts=tuple(Layout(ranks=ranks, grid=grid, boxes=boxes) for ranks, grid, boxes in layouts),
        files=tuple(written.files),
        facts={**facts, FACT: {"values": written.values, "paths": _paths(metadata.planner_data)}},
    )


def _tensor_entry(
    key: str, entry: TensorStorageMetadata, chunks: Sequence[Chunk], layouts: dict[tuple[Any, ...], int]
) -> TensorEntry:
    shape, dtype = tuple(entry.size), dtype_name(entry.properties.dtype, key)
    for chunk in chunks:
        if chunk.dtype != dtype:
            raise DamagedError(
                f"{key}: planned as {dtype}, rank {chunk.rank} wrote {chunk.dtype}; nothing was published"
            )
    full = sorted((chunk for chunk in chunks if chunk.box.volume), key=lambda chunk: chunk.box)
    planned = sorted(box for box in (Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks) if box.volume)
    if math.prod(shape) == 0:
        full = [chunk for chunk in chunks if chunk.box.lengths == shape and not any(chunk.box.offsets)][:1]
        planned = [chunk.box for chunk in full]
    if [chunk.box for chunk in full] != planned or not full:
        raise DamagedError(
            f"{key}: planned were the chunks {' '.join(map(str, planned)) or 'none'}, written "
            f"{' '.join(str(chunk.box) for chunk in full) or 'none'}; nothing was published"
        )
    prove_partition(shape, planned, where=key)
    identity = (tuple(chunk.rank for chunk in full), *_cut(shape, planned))
    return TensorEntry(dtype, shape, layouts.setdefault(identity, len(layouts)))


def _cut(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[Any, Any]:
    """(grid, None) when the sorted boxes are a regular grid, else (None, boxes)."""
    if len(boxes) == 1:
        return (1,) * len(shape), None
    grid = tuple(len({box.offsets[d] for box in boxes}) for d in range(len(shape)))
    if math.prod(grid) == len(boxes) and all(grid_box(shape, grid, i) == box for i, box in enumerate(boxes)):
        return grid, None
    return None, tuple((box.offsets, box.lengths) for box in boxes)


def _paths(planner_data: Any) -> dict[str, list[str | int]] | None:
    """Where the keys came from in the nested state; only what splitting at the dots would not give again."""
    if planner_data is None:
        return None
    usable = isinstance(planner_data, dict) and all(
        isinstance(path, tuple) and all(type(part) in (str, int) for part in path) for path in planner_data.values()
    )
    if not usable:
        raise UsageError(f"the planner's data is {type(planner_data).__name__}; only a table of key → path is stored")
    return {key: list(path) for key, path in planner_data.items() if path != tuple(key.split("."))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A checkpoint as DCP sees it: its metadata, and where each key lies."""

    metadata: Metadata
    values: Mapping[str, int]
    """Key → rank that wrote the value."""
    tensors: Mapping[str, tuple[str, str]]
    """Key → (component, key) in the manifest."""
    holders: Mapping[tuple[str, tuple[int, ...]], int]
    """(key, offsets) → rank that wrote the chunk."""


def contents_of(checkpoint: Checkpoint) -> Contents:
    """What a checkpoint holds. One that DCP did not write shows its tensors as `component/key`."""
    manifest = checkpoint.manifest
    values, paths = _facts(checkpoint)
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in values}
    tensors: dict[str, tuple[str, str]] = {}
    holders: dict[tuple[str, tuple[int, ...]], int] = {}
    for component, found in manifest.components.items():
        for key, entry in found.tensors.items():
            name = key if FACT in manifest.facts and component == COMPONENT else f"{component}/{key}"
            layout = manifest.layouts[entry.layout]
            boxes = [layout_box(layout, entry.shape, position) for position in range(len(layout.ranks))]
            kept = [(box, rank) for box, rank in zip(boxes, layout.ranks, strict=True) if box.volume or len(boxes) == 1]
            holders.update({(name, box.offsets): rank for box, rank in kept})
            tensors[name] = component, key
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_named(entry.dtype, name)),
                size=torch.Size(entry.shape),
                chunks=[ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box, _ in kept],
            )
    planner_data = None if paths is None else {key: tuple(paths.get(key, key.split("."))) for key in entries}
    metadata = Metadata(entries, planner_data=planner_data, version=MANIFEST_SCHEMA)
    return Contents(metadata=metadata, values=values, tensors=tensors, holders=holders)


def _facts(checkpoint: Checkpoint) -> tuple[dict[str, int], dict[str, list[str | int]] | None]:
    """(value → rank, key → path) as the manifest says; SchemaError for anything of another form."""
    found = checkpoint.facts.get(FACT)
    if found is None:
        return {}, None
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        values, paths = found["values"], found["paths"]
        ranks_known = all(type(rank) is int and 0 <= rank < checkpoint.world_size for rank in values.values())
        parts_known = all(type(part) in (str, int) for path in (paths or {}).values() for part in path)
        tensors = checkpoint.manifest.components[COMPONENT].tensors
        if ranks_known and parts_known and not values.keys() & tensors.keys():
            return dict(values), paths
    raise SchemaError(f"{checkpoint.entry.name}: its facts {FACT!r} are not what samerun writes")
