"""Told to stop inside a window: it is finished, or dropped before the same microbatch on every rank; never a mix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rank_pool import RankPool
from samerun.core.clock import ManualClock
from samerun.drill.traces import causes, first_differences, read_traces
from samerun.run.faults import FaultPlan


def start(pool: RankPool, world_size: int, path: Path, trace: Path, call: str = "train", **options: Any) -> list[Any]:
    environ = {"SAMERUN_FAULTS": FaultPlan(trace=trace).to_text()}
    return pool.run(world_size, f"scenarios:{call}", environ=environ, path=str(path), **options)


def newest(run: Path) -> dict[str, Any]:
    """The progress of the newest checkpoint."""
    events = [json.loads(line) for file in (run / "journal").glob("0*.jsonl") for line in file.read_text().splitlines()]
    saved: dict[str, Any] = [event for event in events if event["event"] == "saved"][-1]["progress"]
    return saved


@pytest.mark.parametrize(("world_size", "wrap"), [(1, "none"), (2, "ddp"), (2, "fsdp"), (3, "ddp")])
def test_a_window_that_no_longer_fits_is_dropped_on_all_ranks_and_resumes_as_the_twin(
    ranks: RankPool, tmp_path: Path, world_size: int, wrap: str
) -> None:
    """SIGTERM to the last rank after the first microbatch of window 5, with less time than the rest of it takes."""
    options = {"wrap": wrap, "save_every": "1000 updates", "global_batch": 6 * max(2, world_size), "until": 7}
    start(ranks, world_size, tmp_path / "twin", tmp_path / "twin-trace", **options)
    told = {"call": "train_told", "at": [5, 0, world_size - 1], "warning": "13 s"}
    stops = start(ranks, world_size, tmp_path / "run", tmp_path / "run-trace", **told, **options)
    assert all(stop["reason"].count("of window 5, which is dropped, saved as u000000005-") for stop in stops), stops
    assert len({stop["reason"].partition("before microbatch")[2][:3] for stop in stops}) == 1, "another microbatch each"
    start(ranks, world_size, tmp_path / "run", tmp_path / "run-trace", **options)
    twin, run = read_traces(tmp_path / "twin-trace"), read_traces(tmp_path / "run-trace")
    assert causes(run) == []
    assert {name: first for name, first in first_differences(twin, run).items() if first} == {}


def test_a_window_that_fits_is_finished(ranks: RankPool, tmp_path: Path) -> None:
    told = {"call": "train_told", "at": [5, 0, 1], "warning": "30 s", "wrap": "ddp", "save_every": "1000 updates"}
    stops = start(ranks, 2, tmp_path / "run", tmp_path / "trace", **told)
    assert "dropped" not in stops[0]["reason"] and "saved as u000000006-" in stops[0]["reason"]


def test_what_the_user_changed_inside_the_window_is_not_saved(ranks: RankPool, tmp_path: Path) -> None:
    """A component that nobody could put back must not be saved beside streams and buffers that were."""
    told = {"call": "train_told", "at": [5, 0, 1], "warning": "13 s", "wrap": "ddp", "changes_extra": True}
    stops = start(ranks, 2, tmp_path / "run", tmp_path / "trace", save_every="3 updates", **told)
    for stop in stops:
        assert "not saved: ema changed inside the window; the newest checkpoint is u000000004-" in stop["reason"]


UPDATE, BATCH = 1840, 64


@pytest.fixture(scope="module")
def at_1836(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has come to update 1836, four before the worked case."""
    path = tmp_path_factory.mktemp("worked") / "run"
    worked_case(path, until=UPDATE - 4, micro_batch=BATCH)
    return path


def worked_case(path: Path, *, until: int, micro_batch: int, told: Any = None) -> Any:
    import torch

    import samerun
    from samerun.preempt import Preemption

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    inputs = torch.randn(5 * BATCH, 3)
    data = samerun.Data(
        list(zip(inputs, inputs.sum(1, keepdim=True), strict=True)),
        global_batch=BATCH,
        micro_batch=micro_batch,
        on_change="rebatch",
    )
    run = samerun.Run(
        path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=data,
        save_every="100000 updates",
        preemption=Preemption(warning=told.warning if told else None),
        health="off",
    )
    with run:
        for window in run.windows(until=until):
            for number, (x, y) in enumerate(window, start=1):
                window.backward(((model(x) - y) ** 2).sum(), len(x))
                if told is not None:
                    told.after(run, window.index, number)
            window.step()
    return run


class Told:
    """SIGTERM after microbatch 5 of 8 in the window after update 1840; a microbatch takes ten seconds."""

    def __init__(self, warning: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.warning = warning
        self.clock = ManualClock()
        for module in ("samerun.run.starting.opening", "samerun.preempt.flag"):
            monkeypatch.setattr(f"{module}.SystemClock", lambda: self.clock)

    def after(self, run: Any, window: int, number: int) -> None:
        import os
        import signal
        import time

        self.clock.advance(10.0)
        if (window, number) == (UPDATE, 5):
            os.kill(os.getpid(), signal.SIGTERM)
            while not run.alive():
                time.sleep(0.001)


@pytest.mark.parametrize(
    ("warning", "updates", "samples"),
    [("60 s", 1841, 117_824), ("33 s", 1840, 117_760)],  # three microbatches, teardown and margin need 34 s
)
def test_the_worked_case_ends_at_one_of_two_edges_and_never_between(
    at_1836: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warning: str, updates: int, samples: int
) -> None:
    from samerun.errors import Stopped

    run = tmp_path / "run"
    shutil.copytree(at_1836, run)
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        worked_case(run, until=2000, micro_batch=8, told=Told(warning, patched))
    assert (newest(run)["updates"], newest(run)["samples"]) == (updates, samples)
    worked_case(run, until=1843, micro_batch=8)
    assert (newest(run)["updates"], newest(run)["samples"]) == (1843, 1843 * BATCH)
