"""Copies of what is to be written, so that live tensors may change while the bytes travel.

One buffer, reused from save to save: memory is taken once and never grows with the number of saves. It is as large as
what this rank writes of one checkpoint, pinned when the tensors come from an accelerator.

What is copied late is sealed at the edge and its copy judged against the seal, so a write in between cannot get into a
checkpoint unseen.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from samerun.checkpoint.save.seal import is_sealed_on_device, seal
from samerun.checkpoint.tensors import as_carrier
from samerun.errors import StorageError, TornCopyError
from samerun.state.fingerprint import tensor_digest

if TYPE_CHECKING:
    from samerun.checkpoint.save.fingerprints import Fingerprints
    from samerun.checkpoint.save.stage import Piece, Staged

_ALIGNMENT: Final = 64


class StagingBuffer:
    """Host memory for one save at a time: its owner sees to it that the last one is through before the next copies."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def places(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Where each piece is to be copied to. StorageError (ENOMEM) when there is no memory for that."""
        self._reserve(needed_bytes(pieces), pinned=any(piece.tensor.is_cuda for piece in pieces))
        position, places = 0, []
        for piece in pieces:
            source = as_carrier(piece.tensor)
            size = source.numel() * source.element_size()
            places.append(self._memory[position : position + size].view(source.dtype).view(source.shape))
            position += _aligned(size)
        return places

    def _reserve(self, num_bytes: int, *, pinned: bool) -> None:
        if self.num_bytes >= num_bytes:
            return
        self._memory = self._memory[:0].clone()  # give the old one back first
        try:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        except (MemoryError, RuntimeError) as error:  # torch says RuntimeError for both kinds of memory
            kind = "pinned memory" if pinned else "memory"
            raise StorageError(
                errno.ENOMEM,
                f"no {num_bytes} bytes of {kind} to copy the state into ({error}); max_staging_bytes bounds it, and "
                f"background=False needs none",
            ) from error


class Staging:
    """The copies of one save: `at_edge` before training goes on, `late` beside it, before its next update."""

    def __init__(
        self, staged: Staged, fingerprints: Fingerprints, buffer: StagingBuffer, *, late: Collection[str] = ()
    ) -> None:
        self._staged = staged
        self._fingerprints = fingerprints
        self._late_components = set(late)
        # a rank's own tensors have no box; they are read at the edge anyway, and are small
        waiting = [piece.box is not None and piece.component in late for piece in staged.pieces]
        copies = list(zip(staged.pieces, buffer.places(staged.pieces), strict=True))
        self._now = [copy for copy, waits in zip(copies, waiting, strict=True) if not waits]
        self._late = [copy for copy, waits in zip(copies, waiting, strict=True) if waits]
        self._seals: list[str] = []
        self._ready: dict[torch.device, torch.cuda.Event] = {}

    def at_edge(self) -> None:
        """Copies all that is not late, and seals what is."""
        _fill(self._now, _so_far(self._now))
        copied = {(piece.component, piece.key) for piece, _ in self._now if piece.tensor.numel()}
        self._fingerprints.take([c for c in self._staged.components if c not in self._late_components], but=copied)
        self._seals = [seal(piece.tensor, on_device=is_sealed_on_device(piece.tensor)) for piece, _ in self._late]
        self._ready = _so_far(self._late)

    def late(self) -> None:
        """Copies the rest. TornCopyError naming the tensor when it is no longer what was sealed."""
        _fill(self._late, self._ready)
        for (piece, place), sealed in zip(self._late, self._seals, strict=True):
            copy = place.view(piece.tensor.dtype)
            on_device = is_sealed_on_device(piece.tensor)
            if seal(copy, on_device=on_device) != sealed:
                raise TornCopyError(
                    f"{piece.component}/{piece.key} was changed between the edge and window.step(), while it was being "
                    f"copied; nothing was published"
                )
            if self._fingerprints.wants(piece.component, piece.key) and piece.tensor.numel():
                self._fingerprints.note(piece.component, piece.key, tensor_digest(copy) if on_device else sealed)
        self._fingerprints.take_on_host(self._late_components)  # what other ranks write of them

    def finish(self) -> Staged:
        """What is to be written, free of live memory."""
        for piece, place in self._now:
            if self._fingerprints.wants(piece.component, piece.key) and piece.tensor.numel():
                digest = tensor_digest(place.view(piece.tensor.dtype))
                self._fingerprints.note(piece.component, piece.key, digest)
        places = {id(piece): place for piece, place in (*self._now, *self._late)}
        pieces = tuple(replace(piece, tensor=places[id(piece)]) for piece in self._staged.pieces)
        return replace(self._staged, pieces=pieces, digests=self._fingerprints.all())


def needed_bytes(pieces: Sequence[Piece]) -> int:
    return sum(_aligned(piece.tensor.numel() * piece.tensor.element_size()) for piece in pieces)


def _so_far(copies: Sequence[tuple[Piece, torch.Tensor]]) -> dict[torch.device, torch.cuda.Event]:
    """The work that each accelerator has been given until now: what the copies must wait for, and all of it."""
    devices = {piece.tensor.device for piece, _ in copies if piece.tensor.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


def _fill(copies: Sequence[tuple[Piece, torch.Tensor]], ready: Mapping[torch.device, torch.cuda.Event]) -> None:
    """Complete when it returns. From an accelerator on a stream of its own, beside the kernels of training."""
    streams = {device: torch.cuda.Stream(device) for device in ready}  # type: ignore[no-untyped-call]
    for device, event in ready.items():
        streams[device].wait_event(event)
    with torch.no_grad():
        for piece, place in copies:
            source = as_carrier(piece.tensor)
            if source.is_cuda:
                with torch.cuda.stream(streams[source.device]):
                    place.copy_(source, non_blocking=True)
            else:
                place.copy_(source)
    for stream in streams.values():
        stream.synchronize()


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT
