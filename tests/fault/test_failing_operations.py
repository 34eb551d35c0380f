"""The disk refuses the N-th operation of a save, for every N: the old checkpoint stays, leftovers go, it is told."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import CheckpointError, SamerunError, StorageError
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.storage.faulty import FaultyFiles
from samerun.storage.local import Local

ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations are counted and fail all the same; only the disk's own time is saved."""
    monkeypatch.setattr("samerun.storage.posix.os.fsync", lambda descriptor: None)


def save(store: Store, update: int, rank: int = 0) -> None:
    tensors = {"a": torch.full((7,), float(update)), "b": torch.full((5,), float(update))}
    state = {"weights": Captured(tensors=tensors), "rng": Captured(plain=[update, rank])}
    pending = store.save(state, Progress(windows=Windows(update), updates=Updates(update)), facts={})
    pending.result()


def newest(path: Path) -> int:
    store = Store(path)
    entry = store.catalog().entries[0]
    with store.open(entry) as checkpoint:
        a = torch.zeros(7)
        checkpoint.source("weights").read_into("a", a)
    assert a.tolist() == [entry.progress.updates.value] * 7
    return entry.progress.updates.value


def leftovers(path: Path) -> list[str]:
    complete = {entry.name for entry in Store(path).catalog().entries}
    strays = [str(p.relative_to(path)) for p in path.rglob("*.tmp")]
    strays += [p.name for p in (path / "checkpoints").iterdir() if p.name not in complete]
    strays += [p.name for p in (path / "trash").iterdir()] if (path / "trash").exists() else []
    return strays


def operations_of_a_save(path: Path, size: int) -> int:
    """How many operations a second save takes, its attempt and retention included."""
    files = FaultyFiles(at=None, error_number=errno.EIO)
    prepare(path, size)
    run_ranks(size, lambda group: save(Store(Local(path, files=files), group=group, keep_last=1), 2, group.rank))
    return files.num_operations


def prepare(path: Path, size: int) -> None:
    run_ranks(size, lambda group: save(Store(path, group=group, keep_last=1), 1, group.rank))


@pytest.mark.parametrize("number", ERRORS, ids=lambda n: errno.errorcode[n])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_an_operation_that_fails_costs_nothing_that_was_published(tmp_path: Path, number: int, lasting: bool) -> None:
    count = operations_of_a_save(tmp_path / "count", 1)
    assert count > 50
    outcomes = set()
    prepare(tmp_path / "prepared", 1)
    for at in range(count):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "prepared", path)
        files = FaultyFiles(at=at, error_number=number, lasting=lasting)
        store = Store(Local(path, files=files), keep_last=1)
        try:
            save(store, 2)
            outcomes.add("saved")
            assert newest(path) == 2, at
        except StorageError as error:
            outcomes.add("refused")
            assert error.errno == number
            assert newest(path) in (1, 2), at
        assert files.failed, "the fault never happened"
        files.heal()
        for stray in path.rglob("*.tmp"):
            os.utime(stray, (0, 0))
        save(store, 3)
        assert newest(path) == 3
        assert leftovers(path) == [], at
        assert len(Store(path).catalog().entries) == 1
    assert "refused" in outcomes


def test_on_two_ranks_the_failure_of_one_is_the_failure_of_both(tmp_path: Path) -> None:
    count = operations_of_a_save(tmp_path / "count", 2)
    for at in range(0, count, 3):
        path = tmp_path / str(at)
        prepare(path, 2)
        files = FaultyFiles(at=at, error_number=errno.ENOSPC)

        def body(group: ThreadGroup, path: Path = path, files: FaultyFiles = files) -> str:
            store = Store(Local(path, files=files), group=group, keep_last=1)
            try:
                save(store, 2, group.rank)
            except SamerunError as error:
                return type(error).__name__
            return "saved"

        assert len(set(run_ranks(2, body))) == 1, at
        assert newest(path) in (1, 2)


def test_reading_with_a_failing_disk_is_a_named_error(tmp_path: Path) -> None:
    prepare(tmp_path, 1)
    counting = FaultyFiles(at=None, error_number=errno.EIO)
    load(Store(Local(tmp_path, files=counting)))
    for at in range(counting.num_operations):
        store = Store(Local(tmp_path, files=FaultyFiles(at=at, error_number=errno.EIO)))
        with pytest.raises((StorageError, CheckpointError), match="Input/output error"):
            load(store)


def load(store: Store) -> None:
    catalog = store.catalog()
    if catalog.rejected:
        raise CheckpointError(catalog.rejected[0].reason)
    with store.open(catalog.entries[0]) as checkpoint:
        checkpoint.source("weights").read_into("a", torch.zeros(7))
