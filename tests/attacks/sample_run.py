"""A small run in memory with two complete checkpoints by two ranks, and a load that reads every byte of one."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from samerun.checkpoint import Store
from samerun.checkpoint.catalog import Entry
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.storage.memory import Memory

SIZE = 2


def state(update: int, rank: int) -> dict[str, Captured]:
    return {
        "weights": Captured(
            tensors={"a": torch.arange(7.0) + update, "b": torch.full((3, 5), update, dtype=torch.bfloat16)}
        ),
        "moments": Captured(tensors={"a": torch.arange(11, dtype=torch.int32) * update}, plain={"lr": 0.1, 3: (1,)}),
        "rng": Captured(plain={"n": [update, rank]}, rank_tensors={"r": torch.tensor([update, rank])}),
    }


@cache
def sample() -> Memory:
    """Not to be changed: take a copy."""
    storage = Memory()

    def body(group: ThreadGroup) -> None:
        store = Store(storage, group=group)
        store.write_run({"id": "sample"})
        for update in (1, 2):
            progress = Progress(windows=Windows(update), updates=Updates(update))
            store.save(state(update, group.rank), progress, facts={"text": 'a "quoted" [ { \\ word'}).result()

    run_ranks(SIZE, body)
    return storage


class As:
    """A rank of a world that never has to talk."""

    def __init__(self, rank: int, size: int = SIZE) -> None:
        self.rank, self.size = rank, size


def load(storage: Any, entry: Entry) -> None:
    """Loads all of one checkpoint on every rank; AssertionError when anything but the saved state comes back."""
    for rank in range(SIZE):
        with Store(storage, group=As(rank)).open(entry) as checkpoint:
            wanted = state(entry.progress.updates.value, rank)
            assert set(checkpoint.components) == set(wanted), "SILENT: other components"
            for name, captured in wanted.items():
                source = checkpoint.source(name)
                assert repr(source.plain) == repr(captured.plain), "SILENT: other plain state"
                tensors = {**captured.tensors, **captured.rank_tensors}
                assert set(source.specs) == set(tensors), "SILENT: other tensors"
                for key, tensor in tensors.items():
                    target = torch.zeros_like(tensor)
                    source.read_into(key, target)
                    assert torch.equal(target, tensor), "SILENT: other bytes"
            assert checkpoint.unconsumed() == []


def copy_of(storage: Memory) -> Memory:
    copy = Memory()
    for key, data in storage.objects.items():
        copy.preload(key, data)
    return copy
