"""Saves beside training: what is kept is the edge's state, failures surface at an edge, ends are clean."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samerun
from samerun.checkpoint import Store
from samerun.checkpoint.save.staging import Staging
from samerun.cli.checkpoints.costs import cost_line, cost_of
from samerun.core.events import read_events
from samerun.errors import SaveFailedError, Stopped, UsageError
from samerun.run.starting import opening
from samerun.storage.local import Local
from samerun.storage.opening import open_storage
from samerun.storage.posix import Deed, Files, Operation

Body = Callable[["samerun.Run", int], None]


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(0, index, 7)


class SaveFiles(Files):
    """The file operations of the save threads: counted, held at a gate, or refused at the N-th."""

    def __init__(self, *, refuse_at: int | None = None, number: int = errno.ENOSPC) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_operations = 0
        self._refuse_at = refuse_at
        self._number = number

    def before(self, operation: Operation) -> None:
        if not threading.current_thread().name.startswith("save "):
            return
        if operation.deed is Deed.CREATE:
            assert self.gate.wait(20), "the test never opened the gate"
        self.num_operations += 1
        if self.num_operations - 1 == self._refuse_at:
            raise OSError(self._number, "as the test wants")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SaveFiles]:
    files = SaveFiles()
    place(monkeypatch, files)
    yield files
    files.gate.set()


def place(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    monkeypatch.setattr(opening, "_place", lambda path, plan, faults: Local(path, files=files))
    monkeypatch.setattr("samerun.storage.posix.os.fsync", lambda descriptor: None)


def train(
    path: Path,
    *,
    until: int = 3,
    in_body: Body = lambda run, window: None,
    before_step: Body = lambda run, window: None,
    every: str = "1 updates",
    **options: Any,
) -> list[torch.Tensor]:
    """Returns the weights at each edge, the first included."""
    torch.manual_seed(3)
    model = nn.Linear(7, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = samerun.Data(Numbers(), global_batch=4, micro_batch=2, seed=1)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, save_every=every, **options)
    run.model = model  # type: ignore[attr-defined]
    seen = []
    with run:
        for window in run.windows(until=until):
            seen.append(model.weight.detach().clone())
            for batch in window:
                window.backward((model(batch) ** 2).sum(), len(batch))
            before_step(run, window.index)
            window.step()
            in_body(run, window.index)
        seen.append(model.weight.detach().clone())
    return seen


def saved_weights(path: Path) -> dict[int, torch.Tensor]:
    store, found = Store(path), {}
    for entry in store.catalog().entries:
        with store.open(entry) as checkpoint:
            weight = torch.zeros(7, 7)
            checkpoint.source("weights").read_into("weight", weight)
            found[int(entry.progress.updates)] = weight
    return found


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(path / "journal" / "000001.jsonl") if event["event"] == kind]


def weights_of(run: samerun.Run) -> torch.Tensor:
    weight: torch.Tensor = run.model.weight  # type: ignore[attr-defined]
    return weight


def test_an_update_waits_for_the_copy_of_what_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is kept waiting until the update is about to begin: only the fence keeps the two apart."""
    may_copy, copy = threading.Event(), Staging.late

    def late(staging: Staging) -> None:
        assert may_copy.wait(20)
        copy(staging)

    def before_step(run: samerun.Run, window: int) -> None:
        threading.Timer(0.02, may_copy.set).start()

    def in_body(run: samerun.Run, window: int) -> None:
        if window < 2:  # the last edge waits for its own save
            may_copy.clear()

    monkeypatch.setattr(Staging, "late", late)
    edges = train(tmp_path, before_step=before_step, in_body=in_body, keep_last=9)
    kept = saved_weights(tmp_path)
    assert sorted(kept) == [0, 1, 2, 3]
    for update, weight in kept.items():
        assert torch.equal(weight, edges[update]), update
    assert events(tmp_path, "save_failed") == []


def test_control_without_the_fence_the_update_gets_into_the_copy_and_the_seal_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, copy = threading.Event(), Staging.late

    def late(staging: Staging) -> None:
        assert stepped.wait(20)
        copy(staging)

    monkeypatch.setattr(Staging, "late", late)
    monkeypatch.setattr(Store, "fence", lambda store: None)
    edges = train(tmp_path, in_body=lambda run, window: stepped.set(), keep_last=9)
    (torn,) = events(tmp_path, "save_failed")
    assert torn["error"].startswith("TornCopyError: weights/") and torn["policy"] == "copy_at_edge"
    for update, weight in saved_weights(tmp_path).items():
        assert torch.equal(weight, edges[update]), update


def test_a_loop_that_changes_weights_before_step_is_told_once_and_saved_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As sharpness-aware training does. The first save is thrown away, the coming edge is saved at once."""
    written, copy = threading.Event(), Staging.late

    def late(staging: Staging) -> None:
        if staging._late:
            assert written.wait(20)
        copy(staging)

    def before_step(run: samerun.Run, window: int) -> None:
        weights_of(run).data.add_(0.125)
        written.set()

    monkeypatch.setattr(Staging, "late", late)
    edges = train(tmp_path, until=4, before_step=before_step, every="100 updates")
    kept = saved_weights(tmp_path)
    assert sorted(kept) in ([1, 4], [2, 4])  # at the edge after the one that learned of it
    for update, weight in kept.items():
        assert torch.equal(weight, edges[update]), update
    assert capsys.readouterr().err.count("from now on they are copied at the edge") == 1
    assert len(events(tmp_path, "save_failed")) == 1


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_any_operation_of_a_save_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Of the first save, in turn: earlier state stays, the policy is followed, and a next start ends as the twin."""
    counting = SaveFiles()
    place(monkeypatch, counting)
    counts: list[int] = []

    def count(run: samerun.Run, window: int) -> None:
        run._opened().saving.settle()
        counts.append(counting.num_operations)

    twin = train(tmp_path / "twin", until=2, every="100 updates", in_body=count)
    assert counts[0] > 30
    outcomes = set()
    for at in range(0, counts[0], 3):
        path = tmp_path / str(at)
        place(monkeypatch, SaveFiles(refuse_at=at))
        try:
            ended = train(path, until=2, every="100 updates", on_save_error=policy)
        except SaveFailedError as error:
            outcomes.add("stopped")
            assert policy == "stop" and "as the test wants" in str(error), at
            (failure,) = events(path, "save_failed")
            kept = sorted(saved_weights(path))
            assert ("nothing was saved before" in str(error)) is (kept == []), at
            assert (failure["policy"], failure["progress"]["updates"]) == ("stop", 0)
            place(monkeypatch, SaveFiles())
            ended = train(path, until=2, every="100 updates")
        else:
            outcomes.add("went on")
            assert policy == "continue" or events(path, "save_failed") == [], at
        assert torch.equal(ended[-1], twin[-1]), at
        assert torch.equal(saved_weights(path)[2], twin[2]), at
    assert ("stopped" in outcomes) is (policy == "stop")
    assert "went on" in outcomes


def test_going_on_tries_again_at_the_next_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place(monkeypatch, SaveFiles(refuse_at=2))
    train(tmp_path, until=5, every="2 updates", on_save_error="continue")
    assert sorted(saved_weights(tmp_path)) == [2, 4, 5]
    assert "the save of update 0 failed" in capsys.readouterr().err
    assert [event["progress"]["updates"] for event in events(tmp_path, "saved")] == [2, 4, 5]


def test_a_last_state_that_cannot_be_kept_is_an_error_whatever_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(SaveFiles):
        def before(self, operation: Operation) -> None:
            if threading.current_thread().name.startswith("save ") and operation.deed is Deed.WRITE:
                raise OSError(errno.ENOSPC, "as the test wants")

    place(monkeypatch, Full())
    with pytest.raises(SaveFailedError, match="the last state of the run could not be saved; nothing was saved before"):
        train(tmp_path, on_save_error="continue")
    assert len(events(tmp_path, "save_failed")) == 4


def test_what_a_save_cost_is_in_the_journal(tmp_path: Path, disk: SaveFiles) -> None:
    train(tmp_path, keep_last=2)
    saved = events(tmp_path, "saved")
    assert [event["progress"]["updates"] for event in saved] == [0, 1, 2, 3]
    for event in saved:
        clocks = event["clocks"]
        assert 0 <= clocks["staged_seconds"] <= clocks["durable_seconds"]
        assert clocks["blocked_seconds"] > 0 and clocks["written_seconds"] <= clocks["durable_seconds"]
    assert saved[0]["samples_per_second"] > 0
    assert "samples_per_second" not in saved[-1]  # nothing was trained beside it
    assert len(saved_weights(tmp_path)) == 2
    storage, entry = open_storage(str(tmp_path)), Store(tmp_path).catalog().entries[0]
    cost = cost_of(storage, entry)
    assert cost is not None and cost["clocks"] == saved[-1]["clocks"]
    line = cost_line(cost)
    assert all(f"{name} " in line for name in ("blocked", "staged", "written", "durable")), line
    (tmp_path / "journal" / "000001.jsonl").write_text("no journal any more\n")
    assert cost_of(storage, entry) is None


@pytest.mark.parametrize("background", [True, False])
def test_above_the_byte_budget_saves_wait_and_that_is_said_once(
    tmp_path: Path, disk: SaveFiles, capsys: pytest.CaptureFixture[str], background: bool
) -> None:
    train(tmp_path, max_staging_bytes=100, background=background)
    assert [event["background"] for event in events(tmp_path, "saved")] == [False] * 4
    assert capsys.readouterr().err.count("max_staging_bytes=100: saves wait") == int(background)


def test_a_stop_waits_for_the_save_in_flight_and_saves_its_own_edge(tmp_path: Path, disk: SaveFiles) -> None:
    def stop(run: samerun.Run, window: int) -> None:
        disk.gate.clear()
        run._stop.note("the test", seconds_left=None)
        threading.Timer(0.05, disk.gate.set).start()

    with pytest.raises(Stopped, match="stopped by the test, saved as u000000001"):
        train(tmp_path, before_step=stop, every="100 updates")
    assert sorted(saved_weights(tmp_path)) == [0, 1]


def test_a_stop_that_leaves_no_time_does_not_wait(tmp_path: Path, disk: SaveFiles) -> None:
    def close_gate(run: samerun.Run, window: int) -> None:
        if window == 0:
            run._opened().saving.settle()
            disk.gate.clear()
        else:
            run._stop.note("the test", seconds_left=0.5)

    with pytest.raises(Stopped, match="not saved: a save would not fit; the newest checkpoint is u000000000"):
        train(tmp_path, in_body=close_gate)
    assert sorted(saved_weights(tmp_path)) == [0]


def test_an_exception_in_the_loop_waits_for_the_save_in_flight(tmp_path: Path, disk: SaveFiles) -> None:
    def fail(run: samerun.Run, window: int) -> None:
        threading.Timer(0.05, disk.gate.set).start()
        raise ZeroDivisionError("the user's own")

    disk.gate.clear()
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, in_body=fail)
    assert len(events(tmp_path, "saved")) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save ")]


def test_an_exception_in_the_loop_is_the_one_that_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run: samerun.Run, window: int) -> None:
        raise ZeroDivisionError("the user's own")

    place(monkeypatch, SaveFiles(refuse_at=2))
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, in_body=fail)
    assert "the save of update 0 failed" in capsys.readouterr().err


def test_a_second_interrupt_waits_for_nothing(tmp_path: Path, disk: SaveFiles) -> None:
    def interrupt(run: samerun.Run, window: int) -> None:
        raise KeyboardInterrupt

    disk.gate.clear()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, in_body=interrupt)
    assert saved_weights(tmp_path) == {}


def test_leaving_the_loop_early_keeps_what_was_decided(tmp_path: Path, disk: SaveFiles) -> None:
    torch.manual_seed(3)
    model = nn.Linear(7, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = samerun.Data(Numbers(), global_batch=4, micro_batch=2, seed=1)
    with samerun.Run(tmp_path, model=model, optimizer=optimizer, data=data, save_every="100 updates") as run:
        for window in run.windows(until=9):
            for batch in window:
                window.backward((model(batch) ** 2).sum(), len(batch))
            window.step()
            break
    assert 0 in saved_weights(tmp_path)


def test_while_a_save_is_being_written_pointer_and_older_checkpoints_stay(tmp_path: Path, disk: SaveFiles) -> None:
    """keep_last=1: neither is touched when the save is handed over, only once it is whole."""
    seen = []

    def look(run: samerun.Run, window: int) -> None:
        if window == 0:
            run._opened().saving.settle()
            disk.gate.clear()
        elif window == 1:  # update 1 is being written
            pointer = json.loads((tmp_path / "latest.json").read_text())["name"]
            seen.append((pointer, [entry.name for entry in Store(tmp_path).catalog().entries]))
            disk.gate.set()

    train(tmp_path, until=2, in_body=look, keep_last=1)
    ((pointer, kept),) = seen
    assert pointer.startswith("u000000000-") and kept == [pointer]
    assert sorted(saved_weights(tmp_path)) == [2]
    assert json.loads((tmp_path / "latest.json").read_text())["name"].startswith("u000000002-")


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"on_save_error='ignore' is unknown; choose one of 'stop', 'continue'"):
        train(tmp_path, on_save_error="ignore")
    with pytest.raises(UsageError, match="max_staging_bytes=-1"):
        train(tmp_path, max_staging_bytes=-1)
