"""One component of one checkpoint as a component's `restore` sees it: plain values, specs, and verified tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from samerun.checkpoint.load.reading import read_box
from samerun.checkpoint.save.plan import layout_box
from samerun.checkpoint.tensors import Held, Slices, as_carrier, dtype_named, held
from samerun.core.component import TensorSpec
from samerun.errors import DamagedError, MismatchError, UsageError
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.layout import Box, grid_positions, whole

if TYPE_CHECKING:
    from samerun.checkpoint.load.opened import Checkpoint
    from samerun.core.component import Plain
    from samerun.format.schema import Chunk, Layout, RankTensor, TensorEntry


class CheckpointSource:
    """Implements `core.component.Source` over an opened checkpoint."""

    def __init__(self, checkpoint: Checkpoint, component: str) -> None:
        self._checkpoint = checkpoint
        self._component = component
        self._entry = checkpoint.manifest.components[component]
        own = checkpoint.index(checkpoint.own_rank).rank_tensors.get(component, {})
        self._own: Mapping[str, RankTensor] = own if checkpoint.same_size else {}
        self._read: set[str] = set()
        self._plain_read = False

    @property
    def plain(self) -> Plain:
        if self._entry.plain == "differ" and not self._checkpoint.same_size:
            raise MismatchError(
                f"{self._where}: its plain state differs between the {self._checkpoint.world_size} ranks that saved it "
                f"and this run has another number of ranks; read `plain_per_rank` and decide"
            )
        self._plain_read = True
        return self._checkpoint.plain(self._component, self._checkpoint.own_rank)

    @property
    def plain_per_rank(self) -> list[Plain] | None:
        if self._entry.plain != "differ":
            return None
        self._plain_read = True
        return [self._checkpoint.plain(self._component, rank) for rank in range(self._checkpoint.world_size)]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        entries: dict[str, TensorEntry | RankTensor] = {**self._entry.tensors, **self._own}
        return {
            key: TensorSpec(dtype=dtype_named(entry.dtype, f"{self._where}/{key}"), shape=entry.shape)
            for key, entry in entries.items()
        }

    def unconsumed(self) -> list[str]:
        plain_left = self._entry.plain != "none" and not self._plain_read
        if self._entry.plain == "differ" and not self._checkpoint.same_size:
            plain_left = False  # no rank of another world can be asked for what belongs to none of them
        left = [f"{self._component}/{key}" for key in (*self._entry.tensors, *self._own) if key not in self._read]
        return ([self._component] if plain_left else []) + left

    def read_into(self, key: str, target: torch.Tensor | Slices) -> None:
        path = f"{self._where}/{key}"
        entry = self._entry.tensors.get(key) or self._own.get(key)
        if entry is None:
            raise MismatchError(f"{path}: the checkpoint holds no such tensor for this rank")
        wanted = _wanted(target, path)
        if (wanted.dtype, wanted.shape) != (entry.dtype, entry.shape):
            raise MismatchError(
                f"{path}: the checkpoint holds {entry.dtype} {list(entry.shape)}, this run has {wanted.dtype} "
                f"{list(wanted.shape)}; load it where it fits, or start from weights with warm_start"
            )
        with torch.no_grad():
            for box, part in wanted.parts:
                if box.volume == 0:
                    continue
                if key in self._own:
                    own = self._own[key]
                    blocks = self._checkpoint.blocks(self._checkpoint.own_rank)
                    read_box(blocks, own.start, own.shape, whole(own.shape), as_carrier(part))
                else:
                    self._read_shared(key, box, as_carrier(part), path)
        self._read.add(key)

    @property
    def _where(self) -> str:
        return f"{self._checkpoint.entry.name}: {self._component}"

    def _read_shared(self, key: str, wanted: Box, target: torch.Tensor, path: str) -> None:
        entry = self._entry.tensors[key]
        layout = self._checkpoint.manifest.layouts[entry.layout]
        sources: list[tuple[int, Box, Box]] = []
        for position in _positions(layout, entry.shape, wanted):
            stored = layout_box(layout, entry.shape, position)
            common = stored.meet(wanted)
            if common is not None:
                sources.append((layout.ranks[position], stored, common))
        covered = sum(common.volume for _, _, common in sources)
        if covered != wanted.volume:
            raise MismatchError(f"{path}: chunks cover {covered} of the {wanted.volume} elements of {wanted}")
        for rank, stored, common in sources:
            chunk = self._chunk(rank, key, stored, path)
            end = chunk.start + stored.volume * ITEM_BYTES[entry.dtype]
            blocks = self._checkpoint.blocks(rank)
            if end > blocks.num_bytes:
                raise DamagedError(f"{path}: the chunk {stored} of rank {rank} ends at byte {end}, beyond its file")
            inner = common.within(wanted)
            part = target
            for axis, (offset, length) in enumerate(zip(inner.offsets, inner.lengths, strict=True)):
                part = part.narrow(axis, offset, length)
            read_box(blocks, chunk.start, stored.lengths, common.within(stored), part)

    def _chunk(self, rank: int, key: str, stored: Box, path: str) -> Chunk:
        chunks = self._checkpoint.index(rank).chunks.get(self._component, {}).get(key, ())
        for chunk in chunks:
            if (chunk.offsets, chunk.lengths) == (stored.offsets, stored.lengths):
                return chunk
        raise DamagedError(f"{path}: the index of rank {rank} has no chunk {stored}, which the manifest names")


def _positions(layout: Layout, shape: tuple[int, ...], wanted: Box) -> list[int]:
    if layout.grid is not None:
        return list(grid_positions(shape, layout.grid, wanted))
    assert layout.boxes is not None, "a layout has a grid or boxes"
    return list(range(len(layout.boxes)))


def _wanted(target: torch.Tensor | Slices, path: str) -> Held:
    try:
        return held(target, path)
    except UsageError as error:
        raise MismatchError(f"{error}; nothing can be read into it") from error
