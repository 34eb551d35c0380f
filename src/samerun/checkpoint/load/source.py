"""One component of one checkpoint as a component's `restore` sees it: plain values, specs, and verified tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from samerun.checkpoint.load.reading import Part, read_own, read_shared
from samerun.checkpoint.tensors import Held, Slices, as_carrier, dtype_named, held
from samerun.core.component import TensorSpec
from samerun.errors import MismatchError, UsageError
from samerun.format.layout import Box

if TYPE_CHECKING:
    from samerun.checkpoint.load.opened import Checkpoint
    from samerun.core.component import Plain
    from samerun.format.schema import RankTensor, TensorEntry


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

    def of_first_rank(self) -> CheckpointSource:
        """The same, with what rank 0 held where ranks differed and this run has another number of ranks.

        For state in which rank 0 speaks for all, as it does for DDP's buffers; nothing else should ask.
        """
        self._own = self._checkpoint.index(self._checkpoint.own_rank).rank_tensors.get(self._component, {})
        return self

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
                target = as_carrier(part)
                for inner, array in self._parts(key, box):
                    _narrowed(target, inner).copy_(torch.from_numpy(array))
        self._read.add(key)

    @property
    def _where(self) -> str:
        return f"{self._checkpoint.entry.name}: {self._component}"

    def _parts(self, key: str, box: Box) -> Iterator[Part]:
        if key in self._own:
            return read_own(self._checkpoint, self._checkpoint.own_rank, self._own[key])
        if box.volume == 0:
            return iter(())
        return read_shared(self._checkpoint, self._component, key, box)


def _narrowed(target: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        target = target.narrow(axis, offset, length)
    return target


def _wanted(target: torch.Tensor | Slices, path: str) -> Held:
    try:
        return held(target, path)
    except UsageError as error:
        raise MismatchError(f"{error}; nothing can be read into it") from error
