"""Deadlines, sinks and the guard."""

from __future__ import annotations

import json
import math
import sys
import threading
import types
from pathlib import Path

import pytest

from samerun.core.clock import ManualClock
from samerun.errors import UsageError
from samerun.health.guard import Guard
from samerun.health.hang import Deadlines, HangWatch, Overdue, PhaseWatch, missing_ranks
from samerun.health.sinks import JsonlSink, TensorBoardSink


def learned(clock: ManualClock) -> PhaseWatch:
    watch = PhaseWatch(clock=clock)
    for number in range(5):
        watch.enter("forward", f"window {number}")
        clock.advance(20.0)
        watch.enter("save", f"edge {number}")
        clock.advance(400.0)
    return watch


def test_deadlines_are_learned_by_phase() -> None:
    deadlines = Deadlines()
    assert deadlines.seconds("forward") == 1800
    for seconds in (20.0, 21.0, 19.0):
        deadlines.took("forward", seconds)
    assert deadlines.seconds("forward") == 105
    for seconds in [0.001] * 25:
        deadlines.took("forward", seconds)
    assert deadlines.seconds("forward") == 60  # the floor; one slow window of long ago no longer counts
    assert deadlines.seconds("save") == 1800


def test_a_long_save_is_no_hang_and_a_long_forward_is() -> None:
    clock = ManualClock()
    watch = learned(clock)
    watch.enter("save", "edge 5")
    clock.advance(700.0)
    assert watch.overdue() is None
    watch.enter("forward", "window 6")
    clock.advance(101.0)
    found = watch.overdue()
    assert found is not None
    assert (found.phase, found.where, found.deadline, found.longest) == ("forward", "window 6", 100, 20)
    assert watch.overdue() is None  # told once
    clock.wall_offset_seconds += 1e6
    watch.enter("forward", "window 7")
    assert watch.overdue() is None  # a jump of the wall clock is no hang


def test_nothing_is_watched_before_and_after() -> None:
    watch = PhaseWatch(clock=ManualClock())
    assert watch.overdue() is None
    watch.enter("forward", "window 0")
    watch.leave()
    assert watch.overdue() is None


def test_a_thread_reports_while_the_loop_stands_still() -> None:
    clock, told, seen = ManualClock(), threading.Event(), []
    watch = learned(clock)
    watch.enter("forward", "window 6")

    def report(found: Overdue) -> None:
        seen.append(found)
        told.set()

    thread = HangWatch(watch, report, every_seconds=0.01)
    thread.start()
    clock.advance(1000.0)
    assert told.wait(20)
    thread.close()
    assert [found.where for found in seen] == ["window 6"]
    assert "nothing is stopped" in str(seen[0])


@pytest.mark.parametrize(
    ("phases", "missing"),
    [
        ({0: "backward and step", 1: "data", 2: "backward and step"}, [1]),
        ({0: "backward and step", 2: "backward and step"}, [1]),
        (dict.fromkeys(range(3), "backward and step"), []),  # all wait: the network, or none can be blamed
    ],
)
def test_the_one_who_does_not_wait_is_missing(phases: dict[int, str], missing: list[int]) -> None:
    assert missing_ranks(phases, num_ranks=3) == missing


def test_scalars_as_json_lines(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "scalars.jsonl")
    sink.write(7, {"loss": 2.5, "grad_norm": math.nan})
    sink.write(8, {"loss": -math.inf})
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert lines == [{"step": 7, "loss": 2.5, "grad_norm": "nan"}, {"step": 8, "loss": "-inf"}]


def test_tensorboard_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        TensorBoardSink(tmp_path)


def test_tensorboard_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's protocol, with a module in its place: the package is heavy and none of ours."""
    calls: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            calls.append(("open", folder))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append(("close",))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    sink = TensorBoardSink(tmp_path)
    sink.write(7, {"loss": 2.5, "lr": 0.1})
    sink.close()
    assert calls == [("open", str(tmp_path)), ("loss", 2.5, 7), ("lr", 0.1, 7), ("close",)]


def test_a_detector_that_raises_is_named_and_switched_off_once() -> None:
    told: list[str] = []
    guard, calls = Guard(told.append), []

    def broken(value: int) -> list[int]:
        calls.append(value)
        raise ZeroDivisionError("of its own")

    assert [guard.call("spike", broken, value, default=[]) for value in (1, 2, 3)] == [[], [], []]
    assert calls == [1]
    assert len(told) == 1 and "'spike'" in told[0] and "of its own" in told[0]
    assert guard.call("other", lambda: [4], default=[]) == [4]
    assert not guard.is_on("spike") and guard.is_on("other")


def test_a_stop_is_not_swallowed() -> None:
    guard = Guard(lambda _: None)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.call("spike", interrupted, default=None)
