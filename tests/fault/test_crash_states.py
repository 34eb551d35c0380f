"""Invariant 3: whatever instant the machine dies, the next start loads a complete checkpoint, no older one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fault.crash_model import Disk
from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import CheckpointError
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.storage.faulty import RecordingFiles
from samerun.storage.local import Local
from samerun.storage.memory import Memory
from samerun.storage.posix import Deed, Operation

STATES_PER_MOMENT = 24
"""For the controls, which stop at the first state that gives them away."""


def state(update: int, rank: int) -> dict[str, Captured]:
    return {
        "weights": Captured(tensors={"a": torch.full((7,), float(update)), "b": torch.full((13, 2), update)}),
        "rng": Captured(plain=[update, rank], rank_tensors={"r": torch.tensor([update, rank])}),
    }


def record(path: Path, *, size: int, saves: int, keep_last: int) -> tuple[list[Operation], list[tuple[int, int, int]]]:
    """All operations of an attempt with `saves` saves, and (operations so far, update, attempt) at each return."""
    files = RecordingFiles()
    returned: list[tuple[int, int, int]] = []

    def body(group: ThreadGroup) -> None:
        store = Store(Local(path, files=files), group=group, keep_last=keep_last)
        store.write_run({"id": "r"})
        epoch = store.open_attempt({})
        group.barrier()
        if group.rank == 0:
            returned.append((len(files.operations), 0, epoch))
        for update in range(1, saves + 1):
            progress = Progress(windows=Windows(update), updates=Updates(update))
            store.save(state(update, group.rank), progress, facts={}).result()
            group.barrier()
            if group.rank == 0:
                returned.append((len(files.operations), update, epoch))
            group.barrier()

    run_ranks(size, body)
    return files.operations, returned


def newest_loadable(storage: Memory, size: int) -> int:
    """The update of the checkpoint that a start would take, all of its ranks read and compared; 0 for none."""
    for entry in Store(storage).catalog().entries:
        update = entry.progress.updates.value
        try:
            for rank in range(size):
                store = Store(storage, group=_As(rank, size))
                with store.open(entry) as checkpoint:
                    _check(checkpoint, update, rank)
        except CheckpointError:
            continue
        return update
    return 0


def _check(checkpoint: object, update: int, rank: int) -> None:
    a, b, r = torch.zeros(7), torch.zeros(13, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    weights, rng = checkpoint.source("weights"), checkpoint.source("rng")  # type: ignore[attr-defined]
    weights.read_into("a", a)
    weights.read_into("b", b)
    rng.read_into("r", r)
    assert (a.unique().tolist(), b.unique().tolist()) == ([float(update)], [update]), "other bytes were loaded"
    assert (r.tolist(), rng.plain) == ([update, rank], [update, rank]), "other bytes were loaded"


class _As:
    """A rank of a world that never has to talk."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


Returned = list[tuple[int, int, int]]


def violations(
    path: Path, operations: list[Operation], returned: Returned, size: int, *, limit: int
) -> Iterator[str | None]:
    """For each state after each operation: what went wrong in it, or None."""
    disk = Disk(str(path))
    for moment in range(len(operations) + 1):
        if moment:
            disk.apply(operations[moment - 1])
        promised = max((update for count, update, _ in returned if count <= moment), default=0)
        attempt = max((epoch for count, _, epoch in returned if count <= moment), default=0)
        for storage in disk.states(limit=limit, seed=moment):
            loaded = newest_loadable(storage, size)
            if loaded < promised:
                yield f"after operation {moment}: update {promised} was published, {loaded} is loaded"
            elif Store(storage).newest_attempt() < attempt:
                yield f"after operation {moment}: attempt {attempt} was opened and is forgotten"
            else:
                yield None


def is_caught(path: Path, operations: list[Operation], returned: Returned) -> bool:
    return any(violations(path, operations, returned, 1, limit=STATES_PER_MOMENT))


@pytest.mark.parametrize(("size", "saves", "keep_last"), [(1, 3, 1), (2, 3, 2)])
def test_every_crash_state_loads_the_newest_published_checkpoint(
    tmp_path: Path, size: int, saves: int, keep_last: int
) -> None:
    operations, returned = record(tmp_path / "run", size=size, saves=saves, keep_last=keep_last)
    found = list(violations(tmp_path / "run", operations, returned, size, limit=32 if size == 1 else 16))
    assert [text for text in found if text is not None] == []
    assert len(found) > 1000


def test_a_new_attempt_goes_on_from_every_crash_state_and_cleans_up(tmp_path: Path) -> None:
    operations, _ = record(tmp_path / "run", size=1, saves=2, keep_last=1)
    disk = Disk(str(tmp_path / "run"))
    for moment, operation in enumerate(operations):
        disk.apply(operation)
        for storage in disk.states(limit=3, seed=moment):
            store = Store(storage, keep_last=1)
            before = newest_loadable(storage, 1)
            store.write_run({"id": "r"})
            store.open_attempt({})
            progress = Progress(windows=Windows(before + 1), updates=Updates(before + 1))
            pending = store.save(state(before + 1, 0), progress, facts={})
            assert pending.result().progress == progress
            assert pending.retention_error is None
            assert newest_loadable(storage, 1) == before + 1
            assert len(storage.names("checkpoints")) == 1


def _without(operations: list[Operation], deed: Deed, ending: str) -> list[Operation]:
    kept = [op for op in operations if not (op.deed is deed and op.path.endswith(ending))]
    assert len(kept) < len(operations)
    return [_SKIP if op not in kept else op for op in operations]


_SKIP = Operation(deed=Deed.CLOSE)


@pytest.mark.parametrize(
    ("deed", "ending"),
    [
        (Deed.FSYNC, ".safetensors.tmp"),
        (Deed.FSYNC, "rank-00000.json.tmp"),
        (Deed.FSYNC, "manifest.json.tmp"),
        (Deed.SYNC_DIRECTORY, "checkpoints"),
        (Deed.SYNC_DIRECTORY, "attempts"),
        (Deed.SYNC_DIRECTORY, "/run"),
    ],
)
def test_leaving_out_one_kind_of_sync_is_caught(tmp_path: Path, deed: Deed, ending: str) -> None:
    operations, returned = record(tmp_path / "run", size=1, saves=2, keep_last=1)
    assert is_caught(tmp_path / "run", _without(operations, deed, ending), returned)


def test_leaving_out_the_sync_of_the_checkpoint_itself_is_caught(tmp_path: Path) -> None:
    operations, returned = record(tmp_path / "run", size=1, saves=2, keep_last=1)
    broken = [_SKIP if op.deed is Deed.SYNC_DIRECTORY and "/checkpoints/u" in op.path else op for op in operations]
    assert broken != operations
    assert is_caught(tmp_path / "run", broken, returned)


def test_removing_the_old_before_the_new_is_durable_is_caught(tmp_path: Path) -> None:
    operations, returned = record(tmp_path / "run", size=1, saves=2, keep_last=1)
    away = next(i for i, op in enumerate(operations) if op.deed is Deed.RENAME and "/trash/" in op.target)
    renames = [i for i, op in enumerate(operations) if op.path.endswith("manifest.json.tmp") and op.deed is Deed.RENAME]
    early = max(i for i in renames if i < away)
    first = next(i for i, op in enumerate(operations) if op.path.endswith("/trash"))
    removal = operations[first : away + 3]
    moved = operations[:early] + removal + operations[early:first] + operations[away + 3 :]
    shift = len(removal)
    shifted = [(n + shift if early < n <= first else n, update, epoch) for n, update, epoch in returned]
    assert is_caught(tmp_path / "run", moved, shifted)
