"""The group protocol on torch.distributed: an own gloo group, so no checkpoint waits on training collectives.

Values travel as JSON bytes in uint8 tensors; the object collectives of torch would pickle them.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from samerun.errors import PeerError

DEFAULT_SECONDS: Final = 600.0
"""A peer that says nothing for this long is taken for gone. Slow storage, not slow training, sets this figure."""


def meet(device: torch.device) -> None:
    """Comes back once every rank of the default group is here. Raises PeerError where one has left.

    A group of one's own is made over a store, where nobody hears that a peer ended before it came: its makers would
    wait out the whole time limit. The default group's ranks are connected already.
    """
    try:
        dist.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise PeerError(
            f"rank {dist.get_rank()}: another of the {dist.get_world_size()} ranks left before the run was opened; its "
            f"own error says why ({error})"
        ) from error


class TorchGroup:
    """Collective to construct: every rank of the default group makes one at the same moment."""

    def __init__(self, *, seconds: float = DEFAULT_SECONDS) -> None:
        self._seconds = seconds
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def gather(self, value: Any, *, seconds: float | None = None) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._wait(dist.all_gather(lengths, torch.tensor([len(data)]), self._group, async_op=True), seconds)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._wait(dist.all_gather(parts, padded, self._group, async_op=True), seconds)
        return [json.loads(part[: int(length)].numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, value: Any, *, seconds: float | None = None) -> Any:
        data = torch.frombuffer(bytearray(json.dumps(value if self.rank == 0 else None).encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._wait(dist.broadcast(length, 0, self._group, async_op=True), seconds)
        if self.rank != 0:
            data = torch.zeros(int(length), dtype=torch.uint8)
        self._wait(dist.broadcast(data, 0, self._group, async_op=True), seconds)
        return json.loads(data.numpy().tobytes())

    def barrier(self, *, seconds: float | None = None) -> None:
        self.gather(None, seconds=seconds)

    def close(self) -> None:
        """Ends the group on this rank. gloo's threads would outlive it, and spin once a peer has gone."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _wait(self, work: dist.Work | None, seconds: float | None) -> None:
        assert work is not None
        limit = self._seconds if seconds is None else seconds
        try:
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank}: another of the {self.size} ranks left or said nothing for {limit:g} s ({error})"
            ) from error
