"""A LoadPlanner that leaves nothing stale: every leaf of the program, every key of the checkpoint is accounted for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict
from torch.distributed.tensor import DTensor

from samerun.dcp.tree import Leaf, leaves, put
from samerun.dcp.values import value_of_bytes
from samerun.errors import MismatchError
from samerun.format.layout import Box, prove_partition
from samerun.state.checks import require_same_names

_Done = tuple[MetadataIndex, tuple[int, ...]]


class LoadPlanner(DefaultLoadPlanner):
    """DefaultLoadPlanner with proofs, for `dcp.load(…, planner=samerun.dcp.LoadPlanner())`.

    Before anything is read: the program's keys are the checkpoint's keys (`partial=True`: only what both have is
    loaded; `missing` and `unread` list the rest), tensors have the stored dtype and shape, and the reads fill every
    element of every local piece exactly once. Afterwards: every planned read happened. MismatchError names the key.
    Values go back to the very keys they came from, int keys too.

    Ends where reading ends: that the bytes are right is the reader's promise, and only `samerun.dcp.Reader` makes it.
    """

    def __init__(self, *, partial: bool = False) -> None:
        super().__init__(allow_partial_load=partial)
        self.partial = partial
        self.missing: tuple[str, ...] = ()
        """Keys of the program that the checkpoint lacks, left as they were."""
        self.unread: tuple[str, ...] = ()
        """Keys of the checkpoint that the program has no place for."""
        self._leaves: dict[str, Leaf] = {}
        self._open: set[_Done] = set()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if any(leaf.is_tensor and leaf.value.device.type == "meta" for leaf in leaves(state_dict).values()):
            _init_state_dict(state_dict)  # gives tensors of the meta device memory, as DCP's own planner does
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "DCP passes the metadata that the reader gave"
        entries = self.metadata.state_dict_metadata
        found = leaves(self.original_state_dict)
        self._leaves = {leaf.key: leaf for first in found.values() for leaf in _matched(first, set(entries))}
        self.missing = tuple(sorted(key for key in self._leaves if key not in entries))
        self.unread = tuple(sorted(key for key in entries if key not in self._leaves))
        if not self.partial:
            require_same_names("state", saved=entries, live=self._leaves)
        wanted = {key: leaf for key, leaf in self._leaves.items() if key in entries}
        for leaf in wanted.values():
            _check_kind(leaf, entries[leaf.key])
        self.state_dict = {key: leaf.value for key, leaf in wanted.items()}
        plan = create_default_local_load_plan(self.state_dict, self.metadata)
        _prove_coverage(plan, wanted)
        self._open = {_done(item) for item in plan.items}
        return plan

    def load_value(self, read_item: ReadItem, value: Any) -> None:
        """Puts back a value as it was saved, for a reader that has values rather than bytes of torch.save."""
        put(self.original_state_dict, self._leaves[read_item.dest_index.fqn].path, value)
        self._open.discard(_done(read_item))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.load_value(read_item, value_of_bytes(value, read_item.dest_index.fqn))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._open.discard(_done(read_item))

    def finish_load(self) -> None:
        """Told by a reader that it has read everything: what was planned and not read is an error."""
        if self._open:
            keys = sorted({index.fqn for index, _ in self._open})
            raise MismatchError(f"{keys[0]}: was planned and never read, like {len(keys) - 1} more")


def _matched(leaf: Leaf, saved: set[str]) -> Iterator[Leaf]:
    """The leaf, or what is below it where the checkpoint was saved value by value, as stock planners do.

    An empty dict of which the checkpoint says nothing is what a stock planner saved of an empty dict.
    """
    is_dict = isinstance(leaf.value, dict)
    if leaf.key in saved or not (is_dict or isinstance(leaf.value, list)):
        yield leaf
    elif (is_dict and leaf.value) or any(key.startswith(f"{leaf.key}.") for key in saved):
        parts = list(leaf.parts())
        for part in parts:
            yield from _matched(part, saved)
        if not parts:
            yield leaf
    elif not is_dict:
        yield leaf


def _done(item: ReadItem) -> _Done:
    return item.dest_index, tuple(item.dest_offsets)


def _check_kind(leaf: Leaf, entry: TensorStorageMetadata | BytesStorageMetadata) -> None:
    saved = "a plain value"
    if isinstance(entry, TensorStorageMetadata):
        saved = f"{entry.properties.dtype} {list(entry.size)}"
    live = f"{leaf.value.dtype} {list(leaf.value.size())}" if leaf.is_tensor else "a plain value"
    if saved != live:
        raise MismatchError(
            f"{leaf.key}: the checkpoint holds {saved}, this program {live}; load it as it was stored and convert after"
        )


def _prove_coverage(plan: LoadPlan, wanted: dict[str, Leaf]) -> None:
    reads: dict[tuple[str, tuple[int, ...]], list[Box]] = {}
    for item in plan.items:
        if item.type is LoadItemType.TENSOR:
            place = item.dest_index.fqn, tuple(item.dest_index.offset or ())
            reads.setdefault(place, []).append(Box(tuple(item.dest_offsets), tuple(item.lengths)))
    for key, leaf in wanted.items():
        for chunk in _local_boxes(leaf.value) if leaf.is_tensor else ():
            boxes = reads.get((key, chunk.offsets), [])
            if sum(box.volume for box in boxes) != chunk.volume:
                raise MismatchError(f"{key}: the checkpoint covers {sum(b.volume for b in boxes)} elements of {chunk}")
            prove_partition(chunk.lengths, boxes, where=key)


def _local_boxes(tensor: Any) -> list[Box]:
    if isinstance(tensor, ShardedTensor):
        shards = [shard.metadata for shard in tensor.local_shards()]
        return [Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    return [Box((0,) * tensor.dim(), tuple(tensor.size()))]
