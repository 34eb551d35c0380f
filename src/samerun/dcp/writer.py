"""A StorageWriter for DCP: one checkpoint of ckpt.v1 per path. Files with digests first, the manifest last.

Built on the abstract class: what FileSystemWriter does about threads, overwriting and fsync is what this replaces.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from samerun.checkpoint.lookup import view
from samerun.checkpoint.save.plan import SavePlan as StorePlan
from samerun.checkpoint.save.stage import Piece, Staged
from samerun.checkpoint.save.write import write_rank
from samerun.checkpoint.tensors import held
from samerun.dcp import directory
from samerun.dcp.records import COMPONENT, REPORT, build_manifest, collect
from samerun.dcp.values import split_value, value_of_bytes
from samerun.errors import StorageError, UsageError
from samerun.format import names
from samerun.format.codec import encode_plain
from samerun.format.layout import Box
from samerun.format.schema import MANIFEST_SCHEMA

if TYPE_CHECKING:
    from samerun.core.component import Plain
    from samerun.storage.api import Storage


class Writer(StorageWriter):
    """Saves one checkpoint at `path` (a directory, a URL or a Storage) for `dcp.save` and `dcp.async_save`.

    The directory must be empty or missing; a checkpoint is never written over. It exists once `dcp.save` returns, with
    every byte fsynced and in a digest; before that, and after any failure, no reader accepts it. Commit happens only
    if what ranks wrote is exactly the plan. Values that are no tensors are stored as typed JSON; what that cannot
    hold is refused by key. Errors reach the caller inside DCP's CheckpointException; see `real_errors`.

    Ends where DCP ends: a rank that is killed leaves the others in DCP's own collective until its time limit.
    `use_collectives=False` is refused: nobody could then prove that every rank wrote.
    """

    def __init__(self, path: str | os.PathLike[str] | Storage) -> None:
        super().__init__()
        self._storage = directory.storage_at(path)
        self._rank = 0
        self._num_ranks = 1
        self._claims: list[str] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Points the writer at another path; DCP calls it when it is given a `checkpoint_id`."""
        if checkpoint_id is not None:
            self._storage = directory.storage_at(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # DCP passes rank= and use_collectives= only to a parameter that is literally called kwargs
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: a checkpoint is published only when every rank is known to have written"
            )
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._num_ranks = len(plans)
        self._claims.append(directory.claim(self._storage, self._claims))
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = directory.claimed(self._storage)  # not from the plan: a cached plan would bring an older save's
        pieces, results = _resolve_tensors(plan, planner)
        table, own = _resolve_values(plan, planner)
        staged = Staged(
            plan=StorePlan(),
            components={},
            pieces=(*pieces, *own),
            plain={COMPONENT: encode_plain(table, COMPONENT)},
            digests={COMPONENT: {}},
        )
        files = write_rank(view(self._storage, name), name, self._rank, staged, _nowhere)
        results += [_result(item, None, 0) for item in plan.items if item.type is WriteItemType.BYTE_IO]
        report = {
            "checkpoint": name,
            "files": [(file.name, file.num_bytes, file.sha256) for file in files],
            "with_tensors": bool(own),
        }
        results.append(WriteResult(index=REPORT, size_in_bytes=0, storage_data=report))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        name = directory.claimed(self._storage)
        try:
            written = collect(name, results)
            facts = {"versions": {"torch": str(torch.__version__)}}
            manifest = build_manifest(name, metadata, written, self._num_ranks, facts)
            directory.publish(self._storage, manifest)
        except Exception:
            _tidy(self._storage)
            raise
        # `dcp.save` returns this very object
        metadata.storage_data = {r.index: r.storage_data for reported in results for r in reported if r.index != REPORT}
        metadata.storage_meta = self.storage_meta()
        metadata.version = MANIFEST_SCHEMA

    @property
    def checkpoint_id(self) -> str:
        return self._storage.where

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(str(checkpoint_id))


def _nowhere(point: str) -> None:
    """No fault is planned here."""


def _tidy(storage: Storage) -> None:
    """After a failure that is being raised: what cannot be removed now has no manifest, and nobody loads it."""
    try:
        if names.MANIFEST not in storage.names(""):
            directory.clear(storage)
    except StorageError:
        return


def _resolve_tensors(plan: SavePlan, planner: SavePlanner) -> tuple[list[Piece], list[WriteResult]]:
    pieces: list[Piece] = []
    results: list[WriteResult] = []
    for item in plan.items:
        if item.type is not WriteItemType.BYTE_IO:
            piece = _piece(item, planner.resolve_data(item))
            is_whole = piece.box is not None and not piece.is_part
            if piece.tensor.numel() or is_whole:
                pieces.append(piece)
            results.append(_result(item, piece, piece.tensor.numel() * piece.tensor.element_size()))
    return pieces, results


def _piece(item: WriteItem, tensor: Any) -> Piece:
    key, planned = item.index.fqn, item.tensor_data
    if planned is None or not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{key}: the planner planned a tensor and gave {type(tensor).__name__}")
    names.checked_tensor_key(COMPONENT, key)
    found = held(tensor, key)
    size = tuple(planned.size)
    box = Box(tuple(planned.chunk.offsets), tuple(planned.chunk.sizes))
    if (tensor.dtype, found.shape) != (planned.properties.dtype, box.lengths):
        raise UsageError(
            f"{key}: planned were {planned.properties.dtype} {list(box.lengths)}, the state holds {tensor.dtype} "
            f"{list(found.shape)}; a plan cache that does not look at dtypes gives such plans, samerun.dcp.SavePlanner "
            f"has one that does"
        )
    local = found.parts[0][1]
    if 0 in size and not any(box.offsets):  # an empty tensor is written whole, by whoever holds its beginning
        box, local = Box(box.offsets, size), torch.empty(size, dtype=tensor.dtype)
    return Piece(component=COMPONENT, key=key, dtype=found.dtype, box=box, is_part=box.lengths != size, tensor=local)


def _result(item: WriteItem, piece: Piece | None, num_bytes: int) -> WriteResult:
    box = None if piece is None or piece.box is None else (piece.box.offsets, piece.box.lengths)
    data = {"dtype": None if piece is None else piece.dtype, "box": box}
    return WriteResult(index=item.index, size_in_bytes=num_bytes, storage_data=data)


def _resolve_values(plan: SavePlan, planner: SavePlanner) -> tuple[dict[str | int, Plain] | None, list[Piece]]:
    """This rank's values by key, and the tensors inside them; None when it has none."""
    table: dict[str | int, Plain] = {}
    own: list[Piece] = []
    for item in sorted((i for i in plan.items if i.type is WriteItemType.BYTE_IO), key=lambda i: i.index.fqn):
        key = item.index.fqn
        table[key], tensors = split_value(_value(planner, item), key)
        for name, tensor in tensors.items():
            found = held(tensor, name)
            if "whole" not in found.cut:
                raise UsageError(f"{name}: a DTensor inside a tuple cannot be stored; put it into a dict or a list")
            local = found.parts[0][1]
            own.append(
                Piece(
                    component=COMPONENT,
                    key=names.checked_tensor_key(COMPONENT, name),
                    dtype=found.dtype,
                    box=None,
                    is_part=False,
                    tensor=local,
                )
            )
    return table or None, own


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    resolve = getattr(planner, "resolve_value", None)
    if resolve is not None:
        return resolve(item)
    data = planner.resolve_data(item)
    if isinstance(data, torch.Tensor):
        raise UsageError(f"{item.index.fqn}: the planner planned bytes and gave a tensor")
    return value_of_bytes(data, item.index.fqn)
