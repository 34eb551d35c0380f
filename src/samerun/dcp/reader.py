"""A StorageReader for DCP: reads what it is asked for and no more, each byte verified before it is used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from samerun.checkpoint.tensors import Slices
from samerun.dcp import directory
from samerun.dcp.records import COMPONENT, contents_of
from samerun.dcp.values import bytes_of_value, join_value
from samerun.errors import MismatchError
from samerun.format.blocks import ReadAccount
from samerun.format.layout import Box

if TYPE_CHECKING:
    from samerun.checkpoint.load.opened import Checkpoint
    from samerun.dcp.records import Contents
    from samerun.storage.api import Storage


class Reader(StorageReader):
    """Loads the checkpoint at `path` (a directory, a URL or a Storage) for `dcp.load`, on any number of ranks.

    Each rank reads the slices its plan wants, in whole digest blocks; a byte that is not what was written is an error
    that names the file, whatever the planner. A tensor of another dtype is refused, never cast. `account` says how
    many bytes were wanted, read and verified. Memory beside the targets: two spans of 16 MiB and four blocks.

    A directory of a run's own `checkpoints/` can be read too: its tensors are named `component/key`.
    """

    def __init__(self, path: str | os.PathLike[str] | Storage) -> None:
        super().__init__()
        self._storage = directory.storage_at(path)
        self._opened: tuple[Checkpoint, Contents] | None = None
        self.account = ReadAccount()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Points the reader at another path; DCP calls it when it is given a `checkpoint_id`."""
        if checkpoint_id is not None:
            self._storage = directory.storage_at(checkpoint_id)
        self._opened = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        # not `**kwargs`: DCP would try again for each rank and tell only the second failure
        checkpoint = directory.open_checkpoint(self._storage)
        contents = contents_of(checkpoint)
        contents.metadata.storage_meta = StorageMeta(checkpoint_id=self._storage.where)
        self._opened = checkpoint, contents
        return contents.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._opened is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._opened is not None, "DCP sets the reader up first"
        checkpoint, contents = self._opened
        self.account = checkpoint.reads
        with checkpoint:
            holder = None
            for item in sorted(plan.items, key=lambda item: _place(checkpoint, contents, item)):
                if _place(checkpoint, contents, item)[0] != holder:
                    checkpoint.close()  # the blocks of one file at a time are kept, however many files there are
                    holder = _place(checkpoint, contents, item)[0]
                if item.type is LoadItemType.BYTE_IO:
                    _read_value(checkpoint, contents, item, planner)
                else:
                    _read_tensor(checkpoint, contents, item, planner)
        finish = getattr(planner, "finish_load", None)
        if finish is not None:
            finish()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(str(checkpoint_id))


def _place(checkpoint: Checkpoint, contents: Contents, item: ReadItem) -> tuple[int, int, tuple[int, ...]]:
    """(rank that wrote it, first byte of the chunk, offsets in the chunk): the order in which files are read."""
    key = item.storage_index.fqn
    if item.type is LoadItemType.BYTE_IO:
        return contents.values.get(key, 0), 0, ()
    offsets = tuple(item.storage_index.offset or ())
    rank = contents.holders.get((key, offsets))
    if rank is None:
        raise MismatchError(f"{key}: the plan reads a chunk at {list(offsets)}; the checkpoint holds none there")
    component, name = contents.tensors[key]
    chunks = checkpoint.index(rank).chunks.get(component, {}).get(name, ())
    return rank, next((c.start for c in chunks if c.offsets == offsets), 0), tuple(item.storage_offsets)


def _read_tensor(checkpoint: Checkpoint, contents: Contents, item: ReadItem, planner: LoadPlanner) -> None:
    key = item.storage_index.fqn
    component, name = contents.tensors[key]
    start = item.storage_index.offset or ()
    offsets = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise MismatchError(f"{key}: the plan reads {list(item.lengths)} into a tensor of {list(target.shape)}")
    shape = checkpoint.manifest.components[component].tensors[name].shape
    wanted = Slices(dtype=target.dtype, shape=shape, parts={Box(offsets, tuple(item.lengths)): target})
    checkpoint.source(component).read_into(name, wanted)
    planner.commit_tensor(item, target)


def _read_value(checkpoint: Checkpoint, contents: Contents, item: ReadItem, planner: LoadPlanner) -> None:
    key = item.storage_index.fqn
    if key not in contents.values:
        raise MismatchError(f"{key}: the plan reads a value; the checkpoint holds none of that name")
    value = join_value(checkpoint, COMPONENT, contents.values[key], key)
    load = getattr(planner, "load_value", None)
    if load is not None:
        load(item, value)
    else:
        planner.load_bytes(item, bytes_of_value(value))
