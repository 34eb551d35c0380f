"""A SavePlanner that proves what only the ranks' states can show: agreement, coverage, and a cache that sees dtypes."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from samerun.core.canonical import canonical_bytes, sha256_hex
from samerun.dcp.tree import leaves, text_path
from samerun.dcp.values import split_value
from samerun.errors import DamagedError, UsageError
from samerun.format.codec import encode_plain
from samerun.format.layout import Box, prove_partition
from samerun.state.fingerprint import tensor_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SMALL_BYTES: Final = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a rank tells the coordinator besides its items."""

    paths: dict[str, tuple[str | int, ...]]
    digests: dict[str, str]
    """Key → digest of what every rank must hold alike: values, and small tensors of bytes such as random streams."""
    signature: str


class SavePlanner(DefaultSavePlanner):
    """DefaultSavePlanner with proofs, for `dcp.save(…, planner=samerun.dcp.SavePlanner())`.

    Refuses, naming the key, before a byte is written: a value that typed JSON cannot hold; ranks that disagree on a
    tensor's dtype or shape, or on a value that DCP would keep from one of them only; chunks that do not make the whole
    tensor exactly once. A part of the state without tensors is one value and keeps its types (int keys, empty dicts,
    Counters); load it with `samerun.dcp.LoadPlanner`.

    `enable_plan_caching`: the plan is sent only when it changed, dtypes included. The cache lives in this object: pass
    the same planner to every save, on every rank. Tensors that differ between ranks under one key (BatchNorm
    statistics under DDP) are stored from one rank, as DCP does; only values and small byte tensors are compared.
    """

    def __init__(self, *, dedup_save_to_lowest_rank: bool = False, enable_plan_caching: bool = False) -> None:
        super().__init__(dedup_save_to_lowest_rank=dedup_save_to_lowest_rank)
        self._caching = enable_plan_caching
        self._sent: SavePlan | None = None
        self._known: SavePlan | None = None
        self._final: SavePlan | None = None
        self._all: list[SavePlan] = []
        self._planned: tuple[list[SavePlan], Metadata] | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        found = leaves(state_dict)
        self.mappings = {key: text_path(leaf.path) for key, leaf in found.items()}
        self.state_dict = {key: leaf.value for key, leaf in found.items()}
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        sent = Sent(paths=dict(self.mappings), digests=self._digests(plan), signature=_signature(plan))
        self._sent = dataclasses.replace(plan, planner_data=sent)
        self.plan = self._sent
        if self._caching and self._known is not None and self._known.planner_data.signature == sent.signature:
            return SavePlan([], planner_data=sent, usable=False)
        return self._sent

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_digests([plan.planner_data.digests for plan in all_plans])
        plans = [plan if plan.usable else self._recall(rank, plan, all_plans) for rank, plan in enumerate(all_plans)]
        changed = any(plan.usable for plan in all_plans)
        if changed or self._planned is None:
            self._planned = self._create_global_plan(plans)
            self._all = plans
        final, metadata = self._planned
        self.metadata = dataclasses.replace(metadata)  # finish() writes into the one that is handed out
        self.global_plan = final
        return (final if changed else list(all_plans)), self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.usable:
            self._known, self._final = self._sent, new_plan
        assert self._final is not None, "only a plan that was finished before is answered with nothing"
        self.plan = dataclasses.replace(self._final, storage_data=new_plan.storage_data)
        return self.plan

    def resolve_value(self, write_item: WriteItem) -> Any:
        """A value as it is, for a writer that needs no bytes of torch.save."""
        return self.lookup_object(write_item.index)

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_agreement(all_plans)
        plans, metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, BytesStorageMetadata):
                boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
                try:
                    prove_partition(tuple(entry.size), boxes, where=key)
                except DamagedError as error:
                    raise UsageError(
                        f"{error}; the ranks' pieces must make the whole tensor, each element once"
                    ) from error
        paths = {key: path for plan in reversed(all_plans) for key, path in plan.planner_data.paths.items()}
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def _recall(self, rank: int, plan: SavePlan, all_plans: Sequence[SavePlan]) -> SavePlan:
        known = self._all[rank] if len(self._all) == len(all_plans) else None
        if known is None or known.planner_data.signature != plan.planner_data.signature:
            raise UsageError(
                f"rank {rank} says its plan has not changed, but rank 0 does not know it; pass the same SavePlanner to "
                f"every save on every rank, or a fresh one on every rank"
            )
        return known

    def _digests(self, plan: SavePlan) -> dict[str, str]:
        digests = {}
        for item in plan.items:
            value = self.lookup_object(item.index) if item.type is not WriteItemType.SHARD else None
            if item.type is WriteItemType.BYTE_IO:
                digests[item.index.fqn] = _value_digest(value, item.index.fqn)
            elif isinstance(value, torch.Tensor) and value.dtype is torch.uint8 and value.numel() <= _SMALL_BYTES:
                digests[item.index.fqn] = tensor_digest(value)
        return digests


def _value_digest(value: Any, key: str) -> str:
    plain, tensors = split_value(value, key)
    inside = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    return sha256_hex(canonical_bytes([encode_plain(plain, key), inside]))


def _signature(plan: SavePlan) -> str:
    """A digest of everything in a plan that metadata is made of, dtypes included."""
    words = []
    for item in plan.items:
        data = item.tensor_data
        chunk = None if data is None else [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size)]
        dtype = None if data is None else str(data.properties.dtype)
        words.append([item.type.name, item.index.fqn, list(item.index.offset or ()), dtype, chunk])
    return hashlib.sha256(canonical_bytes(words)).hexdigest()


def _check_digests(digests: Sequence[Mapping[str, str]]) -> None:
    """DCP keeps one rank's copy of what is not sharded; so all copies must be alike."""
    first: dict[str, tuple[int, str]] = {}
    for rank, found in enumerate(digests):
        for key, digest in found.items():
            other, known = first.setdefault(key, (rank, digest))
            if digest != known:
                raise UsageError(
                    f"{key}: ranks {other} and {rank} hold different values under this one key, and DCP would keep one "
                    f"of them; give each rank's own state a key of its own, like {key}.rank{rank}"
                )


def _check_agreement(all_plans: Sequence[SavePlan]) -> None:
    first: dict[str, tuple[int, tuple[Any, ...]]] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            data = item.tensor_data
            kind = ("a plain value",) if data is None else (str(data.properties.dtype), list(data.size))
            other, known = first.setdefault(item.index.fqn, (rank, kind))
            if kind != known:
                raise UsageError(
                    f"{item.index.fqn}: rank {other} holds {' '.join(map(str, known))}, rank {rank} "
                    f"{' '.join(map(str, kind))}; ranks must agree, or use different keys"
                )
