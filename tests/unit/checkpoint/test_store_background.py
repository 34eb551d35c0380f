"""Background saves: what is saved is the moment of the call; one in flight; errors surface; memory is reused."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samerun.checkpoint import Pending, Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import FencedError, PeerError, StorageError
from samerun.ranks.group import Solo
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.storage.local import Local
from samerun.storage.posix import Deed, Files, Operation


class Gate(Files):
    """Holds a save before its first byte until `open` is set; may fail it instead."""

    def __init__(self, error_number: int | None = None) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.error_number = error_number

    def before(self, operation: Operation) -> None:
        if operation.deed is Deed.CREATE and operation.path.endswith(".safetensors.tmp"):
            self.reached.set()
            assert self.open.wait(20), "the test never opened the gate"
            if self.error_number is not None:
                raise OSError(self.error_number, "as the test wants")


def progress(update: int) -> Progress:
    return Progress(windows=Windows(update), updates=Updates(update))


def state(tensors: dict[str, torch.Tensor], plain: Any = None) -> dict[str, Captured]:
    return {"weights": Captured(tensors=tensors, plain=plain)}


def test_everything_may_change_right_after_the_call(tmp_path: Path) -> None:
    gate = Gate()
    store = Store(Local(tmp_path, files=gate), background_group=Solo())
    base = torch.arange(40.0)
    tensors = {
        "a": torch.arange(7.0),
        "strided": base[::2],
        "turned": torch.arange(12.0).reshape(3, 4).T,
        "bf": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "complex": torch.tensor([1j, 2.0]),
    }
    wanted = {key: tensor.clone() for key, tensor in tensors.items()}
    plain: dict[str | int, Any] = {"lr": [0.1, 0.2]}
    facts = {"note": ["before"]}
    pending = store.save(state(tensors, plain), progress(1), facts=facts, tags=["first"])
    assert gate.reached.wait(20)
    assert (pending.is_staged, pending.is_durable, pending.is_done) == (True, False, False)
    for tensor in tensors.values():
        tensor.zero_()
    base.fill_(-1)
    plain["lr"].clear()
    facts["note"].append("after")
    with pytest.raises(StorageError, match="still being written") as caught:
        pending.result(0.01)
    assert caught.value.errno == errno.ETIMEDOUT
    gate.open.set()
    entry = pending.result()
    assert entry.facts == {"note": ["before"]}
    with store.open(entry) as checkpoint:
        source = checkpoint.source("weights")
        assert source.plain == {"lr": [0.1, 0.2]}
        for key, tensor in wanted.items():
            target = torch.empty_like(tensor)
            source.read_into(key, target)
            assert torch.equal(target, tensor), key
    assert store.tags() == {"first": entry.name}


def test_the_next_save_waits_and_the_memory_is_taken_once(tmp_path: Path) -> None:
    store = Store(tmp_path, background_group=Solo(), keep_last=2)
    names, buffers = [], set()
    with store:
        for update in range(1, 6):
            pending = store.save(state({"a": torch.full((1000,), float(update))}), progress(update), facts={})
            names.append(pending.name)
            assert store._buffer is not None
            buffers.add((store._buffer._memory.data_ptr(), store._buffer.num_bytes))
        assert len(buffers) == 1
    assert [entry.name for entry in store.catalog().entries] == [names[4], names[3]]
    assert store._buffer is None
    clocks = pending.clocks
    assert clocks.staged_seconds is not None
    assert clocks.blocked_seconds is not None
    assert clocks.written_seconds is not None
    assert clocks.durable_seconds is not None
    assert clocks.staged_seconds <= clocks.blocked_seconds
    assert clocks.written_seconds <= clocks.durable_seconds


@pytest.mark.parametrize("asked", [False, True])
def test_a_failed_background_save_surfaces_once(tmp_path: Path, asked: bool) -> None:
    gate = Gate(errno.ENOSPC)
    gate.open.set()
    store = Store(Local(tmp_path, files=gate), background_group=Solo())
    pending = store.save(state({"a": torch.ones(3)}), progress(1), facts={})
    if asked:
        with pytest.raises(StorageError, match="as the test wants"):
            pending.result()
    else:
        with pytest.raises(StorageError, match="as the test wants"):
            store.save(state({"a": torch.ones(3)}), progress(2), facts={})
    gate.error_number = None
    entry = store.save(state({"a": torch.ones(3)}), progress(3), facts={}).result()
    assert [e.name for e in store.catalog().entries] == [entry.name]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [entry.name]


def test_closing_waits_for_the_save_in_flight_and_raises_its_error(tmp_path: Path) -> None:
    gate = Gate()
    store = Store(Local(tmp_path, files=gate), background_group=Solo())
    pending = store.save(state({"a": torch.ones(3)}), progress(1), facts={})
    threading.Timer(0.05, gate.open.set).start()
    store.close()
    assert pending.is_durable
    gate.error_number = errno.EIO
    store.save(state({"a": torch.ones(3)}), progress(2), facts={})
    with pytest.raises(StorageError, match="as the test wants"):
        store.close()


def test_a_newer_attempt_that_starts_meanwhile_stops_the_save(tmp_path: Path) -> None:
    gate = Gate()
    store = Store(Local(tmp_path, files=gate), background_group=Solo())
    pending = store.save(state({"a": torch.ones(3)}), progress(1), facts={})
    assert gate.reached.wait(20)
    newer = Store(tmp_path)
    assert newer.open_attempt({}) == 2
    gate.open.set()
    with pytest.raises(FencedError, match="attempt 2 has started"):
        pending.result()
    assert newer.catalog().entries == ()


def in_two_worlds(size: int, body: Callable[[ThreadGroup, ThreadGroup], None]) -> None:
    """Runs `body` with two independent groups of the same ranks, as a run and its saves have them."""
    waiting: list[ThreadGroup | None] = [None] * size
    ready, leave = threading.Barrier(size + 1), threading.Event()

    def hold(group: ThreadGroup) -> None:
        waiting[group.rank] = group
        ready.wait()
        leave.wait()

    second = threading.Thread(target=run_ranks, args=(size, hold))
    second.start()
    ready.wait()
    try:
        run_ranks(size, lambda group: body(group, waiting[group.rank]))  # type: ignore[arg-type]
    finally:
        leave.set()
        second.join()


def test_ranks_train_on_while_their_save_is_in_flight(tmp_path: Path) -> None:
    def body(group: ThreadGroup, background: ThreadGroup) -> None:
        store = Store(tmp_path, group=group, background_group=background, keep_last=1)
        weights = {f"w{n}": torch.full((11,), 1.0) for n in range(5)}
        for update in range(1, 5):
            own = {"r": torch.tensor([group.rank, update])}
            saved = {"weights": Captured(tensors=weights), "rng": Captured(plain=group.rank, rank_tensors=own)}
            pending = store.save(saved, progress(update), facts={})
            for tensor in weights.values():
                tensor += 1
            group.gather("a training collective")
        entry = pending.result()
        store.close()
        with store.open(entry) as checkpoint:
            target = torch.zeros(11)
            checkpoint.source("weights").read_into("w3", target)
            assert target.tolist() == [4.0] * 11
            r = torch.zeros(2, dtype=torch.int64)
            checkpoint.source("rng").read_into("r", r)
            assert (r.tolist(), checkpoint.source("rng").plain) == ([group.rank, 4], group.rank)

    in_two_worlds(3, body)
    assert len(Store(tmp_path).catalog().entries) == 1


def test_the_failure_of_one_rank_in_the_background_is_the_failure_of_all(tmp_path: Path) -> None:
    seen: list[str] = []

    def body(group: ThreadGroup, background: ThreadGroup) -> None:
        gate = Gate(errno.EDQUOT if group.rank == 1 else None)
        gate.open.set()
        store = Store(Local(tmp_path, files=gate), group=group, background_group=background)
        pending = store.save(state({"a": torch.ones(8), "b": torch.ones(8)}), progress(1), facts={})
        if group.rank == 0:
            with pytest.raises(StorageError):
                pending.result()
        try:
            store.save(state({"a": torch.ones(8)}), progress(2), facts={})
        except (StorageError, PeerError) as error:
            seen.append(str(error))

    in_two_worlds(2, body)
    assert len(seen) == 2
    assert all("as the test wants" in text for text in seen)


def test_who_waits_for_a_save_waits_for_its_thread() -> None:
    pending, leave, left = Pending("u000000001-00000000"), threading.Event(), []

    def save() -> None:
        pending.finish()
        leave.wait(20)
        left.append("the thread")

    pending.run_in(threading.Thread(target=save))
    threading.Timer(0.1, leave.set).start()
    assert pending.wait()
    assert left == ["the thread"]
