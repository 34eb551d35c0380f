"""Deeds that do not end the process: a mark, a stall, a non-finite batch, a full and a slow disk."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from samerun.errors import StorageError
from samerun.run.faults import Deed, Fault, FaultPlan, FaultPoints, PlannedFiles, fired, hits
from samerun.storage.local import Local


def points(*faults: Fault, trace: Path | None = None) -> FaultPoints:
    return FaultPoints(FaultPlan(trace=trace, faults=faults), rank=0, window=lambda: 3)


def planned(at: str, deed: Deed, **options: float) -> Fault:
    return Fault(at=at, rank=0, deed=deed, seconds=options.get("seconds", 0.0))


def test_a_mark_does_nothing_but_is_remembered(tmp_path: Path) -> None:
    mark = planned("edge:3", Deed.MARK)
    points(mark, trace=tmp_path).at("edge:3")
    assert fired(tmp_path) == [mark.to_json()]


def test_a_stall_takes_its_time() -> None:
    began = time.monotonic()
    points(planned("edge:3", Deed.STALL, seconds=0.05)).at("edge:3")
    assert time.monotonic() - began >= 0.05


def test_a_non_finite_batch_spoils_its_window_and_no_other(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    plan = points(planned("window:3.microbatch:0", Deed.NON_FINITE), trace=tmp_path)
    plan.at("window:3.microbatch:0")
    for _ in range(2):  # also for whoever computes it again
        assert model(torch.ones(2, 3)).isnan().all()
    plan.at("window:4.microbatch:0")
    assert model(torch.ones(2, 3)).isfinite().all()
    assert [hit["hit"] for hit in hits(tmp_path)] == ["0"]


def test_a_poisoned_batch_is_thirty_times_too_much_until_its_window_is_over(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    sound = model(torch.ones(2, 3))
    plan = points(planned("window:3.microbatch:0", Deed.POISON), trace=tmp_path)
    plan.at("window:3.microbatch:0")
    assert torch.equal(model(torch.ones(2, 3)), sound * 30)
    plan.at("window:3.step")
    assert torch.equal(model(torch.ones(2, 3)), sound * 30)
    plan.at("edge:4")
    assert torch.equal(model(torch.ones(2, 3)), sound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bit_of_one_parameter_flips_once_and_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 1)).to(dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plan = points(planned("window:3.microbatch:0", Deed.FLIP), trace=tmp_path)
    plan.at("window:3.microbatch:0")
    for _ in range(2):
        model(torch.ones(2, 3, dtype=dtype))
    differing = [(a != b).sum().item() for a, b in zip(before, model.parameters(), strict=True)]
    assert differing == [1, 0, 0, 0]
    assert [hit["hit"] for hit in hits(tmp_path)] == ["1.weight"]


def test_a_slow_rank_is_slow_in_every_microbatch_from_then_on() -> None:
    plan = points(planned("window:3.microbatch:1", Deed.SLOW, seconds=0.02))
    began = time.monotonic()
    plan.at("window:3.microbatch:0")
    plan.at("window:3.microbatch:1")  # from the next one on
    assert time.monotonic() - began < 0.02
    plan.at("window:3.step")
    plan.at("window:4.microbatch:0")
    assert time.monotonic() - began >= 0.02


def save(storage: Local, name: str) -> None:
    storage.make_prefix(f"checkpoints/{name}")
    with storage.writer(f"checkpoints/{name}/rank-00000.json") as writer:
        writer.write(b"{}")
        writer.publish()


def test_operations_are_numbered_anew_in_each_save(tmp_path: Path) -> None:
    class Listening(FaultPoints):
        def operation(self, number: int) -> None:
            seen.append(number)

    seen: list[int] = []
    storage = Local(tmp_path, files=PlannedFiles(Listening(FaultPlan(), rank=0, window=lambda: 0)))
    storage.put_if_absent("attempts/000001.json", b"{}")
    assert seen == []
    save(storage, "u000000000-00000001")
    first, seen[:] = list(seen), []
    save(storage, "u000000005-00000002")
    assert first == seen == list(range(len(first)))
    assert len(first) > 4


def test_a_full_disk_stays_full(tmp_path: Path) -> None:
    storage = Local(tmp_path, files=PlannedFiles(points(planned("save:op:3", Deed.FULL_DISK))))
    for name in ("u000000000-00000001", "u000000005-00000002"):
        with pytest.raises(StorageError) as caught:
            save(storage, name)
        cause = caught.value.__cause__
        assert isinstance(cause, OSError) and cause.errno == errno.ENOSPC


def test_a_slow_disk_is_slow_from_then_on(tmp_path: Path) -> None:
    storage = Local(tmp_path, files=PlannedFiles(points(planned("save:op:1", Deed.SLOW_DISK, seconds=0.01))))
    began = time.monotonic()
    save(storage, "u000000000-00000001")
    assert time.monotonic() - began >= 0.03
