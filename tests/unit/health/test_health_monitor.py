"""The monitor of one attempt without a training: times, reports, failures, and what it costs."""

from __future__ import annotations

import contextlib
import copy
import errno
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samerun.core.clock import ManualClock
from samerun.core.events import Journal, read_events
from samerun.errors import UsageError
from samerun.health.hang import Overdue
from samerun.health.meter import BufferSync, Meter, Times
from samerun.health.monitor import Decided, Monitor, Surroundings
from samerun.health.options import HealthOptions, Mode
from samerun.health.records.event import read_records
from samerun.health.report import LinkWatch, StragglerWatch
from samerun.health.sinks import Sink
from samerun.health.spike.detector import SpikeDetector
from samerun.ranks.group import Solo
from samerun.run.history import Losses
from unit.health.noise_series import bloom


def decided(window: int, **changed: Any) -> Decided:
    values: dict[str, Any] = {
        "window": window, "start": 7 * window, "end": 7 * window + 7, "coverage": 3, "samples": 7, "weight": 91.0,
        "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "scale": 1.0, "outcome": "updated", "is_loss_bad": False,
    }  # fmt: skip
    return Decided(**{**values, **changed})


class Window:
    """What a run's window of data looks like to the monitor."""

    num_microbatches, slots = 2, 2

    def __init__(self, index: int) -> None:
        self.index = index

    def __iter__(self) -> Iterator[int]:
        return iter((0, 1))


def make(folder: Path | None, told: list[str], **changed: Any) -> Monitor:
    journal = Journal(folder / "journal.jsonl" if folder is not None else None)
    values: dict[str, Any] = {
        "folder": folder, "attempt": 1, "group": Solo(), "journal": journal, "tell": told.append,
        "is_separable": True, "span": None, "memory_bytes": lambda: 2**20, "keeper": None,
        "autocast": contextlib.nullcontext, "checksums": None, "decider": None, "clock": ManualClock(),
        "together_seconds": 0.0,
    }  # fmt: skip
    spikes = changed.pop("spikes", None) or SpikeDetector()
    return Monitor(Surroundings(**{**values, **changed}), spikes)


def test_a_windows_time_is_taken_apart() -> None:
    clock = ManualClock()
    meter, phases = Meter(clock=clock), list[str]()

    def slow() -> Iterator[int]:
        for number in range(3):
            clock.advance(0.25)
            yield number
        clock.advance(0.5)  # a busy machine: the end of the data is no data

    meter.begin()
    clock.advance(1.0)
    for number in meter.waited(slow(), phases.append):
        clock.advance(2.0)
        if number == 2:
            meter.at("window:0.last_backward")
            meter.at("window:0.last_backward")
            clock.advance(4.0)
    meter.at("window:0.step")
    clock.advance(8.0)
    assert meter.end() == Times(window=20.25, compute=7.0, wait=12.5, data=0.75, microbatches=3)
    assert phases[:2] == ["data", "microbatch"]


def test_what_cannot_be_told_apart_is_not_made_up() -> None:
    clock = ManualClock()
    meter = Meter(is_separable=False, clock=clock)
    meter.begin()
    clock.advance(3.0)
    meter.at("window:0.last_backward")
    clock.advance(1.0)
    assert meter.end() == Times(window=4.0, compute=0.0, wait=4.0, data=0.0)


def test_a_devices_own_clock_is_believed() -> None:
    class Span:
        calls: list[str] = []  # noqa: RUF012  # one span in this test

        def begin(self) -> None:
            self.calls.append("begin")

        def mark(self) -> None:
            self.calls.append("mark")

        def seconds(self) -> tuple[float, float] | None:
            return 3.0, 1.5

    clock = ManualClock()
    meter = Meter(span=Span(), clock=clock)
    meter.begin()
    meter.at("window:0.last_backward")  # the host is through in no time
    clock.advance(4.5)
    assert meter.end() == Times(window=4.5, compute=3.0, wait=1.5, data=0.0)
    assert Span.calls == ["begin", "mark"]


def rows(own: list[float]) -> list[Any]:
    return [[c, 0.0, max(own) - c + 0.02, 100.0, 0.0] for c in own]


def test_a_slow_rank_is_told_once_and_once_more_when_it_lasts() -> None:
    watch = StragglerWatch(8)
    own = [0.1, 0.101, 0.099, 0.1, 0.112, 0.1, 0.1, 0.101]
    told = [watch.judge(rows(own))[0] for _ in range(20)]
    assert [len(sentences) for sentences in told] == [1] + [0] * 8 + [1] + [0] * 10
    assert "rank 4" in told[0][0]
    assert "it lasts" in told[9][0]
    assert watch.judge([None, *rows(own)[1:]]) == ([], None)  # a rank that has nothing to say


def test_a_row_is_of_medians_and_needs_ten_windows() -> None:
    watch = StragglerWatch(4)
    times = [Times(window=1.0, compute=0.1, wait=0.2, data=0.05, microbatches=7)] * 9
    for one in times:
        watch.after(one)
    assert watch.row() is None
    for one in [*times, Times(window=9.0, compute=5.0, wait=0.2, data=0.05, microbatches=7)]:
        watch.after(one)
    assert watch.row() == [0.1, 0.05, 0.2, 7.0, 5.0]
    assert watch.num_windows == 0


def test_bloom_is_told_to_the_person_and_to_the_journal(tmp_path: Path) -> None:
    told: list[str] = []
    monitor = make(tmp_path, told)
    for window, loss, norm in bloom():
        for _ in monitor.begin(Window(window)):
            monitor.at(f"window:{window}.last_backward")
        monitor.decided(decided(window, loss=loss, grad_norm=norm))
        monitor.edge(window + 1)
    monitor.close()
    assert "window 31215: grad_norm 0.947" in told[0]
    assert "window 31216: loss 2.595" in told[1]
    assert "recovered" in told[2]
    kinds = [event["kind"] for event in read_events(tmp_path / "journal.jsonl") if event["event"] == "health"]
    assert [kind for kind in kinds if kind != "drift"] == ["spike", "spike", "recovered"]
    assert len(read_records(tmp_path / "rank-00000.windows.jsonl").records) == len(list(bloom()))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_written_as_such(tmp_path: Path, loss: float) -> None:
    monitor = make(tmp_path, [])
    monitor.begin(Window(0))
    monitor.decided(decided(0, loss=loss, grad_norm=math.nan, outcome="non_finite_loss", is_loss_bad=True))
    monitor.close()
    (found,) = read_records(tmp_path / "rank-00000.windows.jsonl").records
    assert repr(found.loss) == repr(loss)
    assert math.isnan(found.grad_norm)


def test_lost_records_are_told_once_and_cost_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    monitor = make(tmp_path / "file" / "health", told, journal=Journal(None))
    failed = threading.Event()

    def append(*_: object) -> int:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    assert monitor._writer is not None
    monitor._writer._append = append
    for window in range(50):
        monitor.begin(Window(window))
        monitor.decided(decided(window))
        if window == 0:
            while monitor._writer.problem is None:  # the writer's thread notices in its own time
                time.sleep(0.001)
    monitor.dump("stop")
    monitor.close()
    assert len([line for line in told if "records are being lost" in line]) == 1
    assert len([line for line in told if "flight recorder could not be written" in line]) == 1


def test_a_failing_reader_of_memory_is_named_and_off(tmp_path: Path) -> None:
    told: list[str] = []

    def broken() -> int:
        raise RuntimeError("no driver")

    monitor = make(tmp_path, told, memory_bytes=broken)
    for window in range(3):
        monitor.begin(Window(window))
        monitor.decided(decided(window))
    monitor.close()
    assert len(told) == 1 and "'memory'" in told[0] and "no driver" in told[0]
    assert [r.memory_bytes for r in read_records(tmp_path / "rank-00000.windows.jsonl").records] == [0, 0, 0]


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    monitor = make(None, [])
    monitor.begin(Window(0))
    monitor.decided(decided(0))
    monitor.dump("stop")
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_it_costs_less_than_the_stated_time(tmp_path: Path) -> None:
    """0.3 ms of this thread's CPU time a window, past the calibration and with a full baseline; five times that here,
    since CPU time also grows on a machine that is busy with something else."""
    monitor = make(tmp_path, [])
    windows = list(bloom(before=1200))
    for window, loss, norm in windows[:600]:
        monitor.decided(decided(window, loss=loss, grad_norm=norm))
    before = time.thread_time()
    for window, loss, norm in windows[600:1200]:
        for _ in monitor.begin(Window(window)):
            monitor.at(f"window:{window}.last_backward")
        monitor.decided(decided(window, loss=loss, grad_norm=norm))
        monitor.edge(window + 1)
    milliseconds = (time.thread_time() - before) / 600 * 1e3
    monitor.close()
    print(f"{milliseconds:.3f} ms a window")
    assert milliseconds < 1.5


def test_modes() -> None:
    assert HealthOptions.parse("observe").mode is Mode.OBSERVE
    assert HealthOptions.parse(Mode.OFF).mode is Mode.OFF
    with pytest.raises(UsageError, match=r"health='react' is unknown; choose one of 'off', 'observe', 'advise', 'act'"):
        HealthOptions.parse("react")


class Recorded(Sink):
    """A sink that remembers, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.fails = fails
        self.num_closed = 0

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.fails:
            raise ConnectionError("the other end is gone")
        self.seen.append((step, dict(scalars)))

    def close(self) -> None:
        self.num_closed += 1


def test_sinks_get_each_window_and_one_that_fails_costs_nothing(tmp_path: Path) -> None:
    good, bad, told = Recorded(), Recorded(fails=True), list[str]()
    monitor = make(tmp_path, told, options=HealthOptions(sinks=(bad, good)))
    for window in range(3):
        monitor.begin(Window(window))
        monitor.decided(decided(window, loss=2.5 + window))
    monitor.close()
    assert len(told) == 1 and "'sink 0 Recorded'" in told[0] and "the other end is gone" in told[0]
    assert [(step, values["loss"]) for step, values in good.seen] == [(0, 2.5), (1, 3.5), (2, 4.5)]
    assert {"grad_norm", "lr", "window_seconds"} <= set(good.seen[0][1])
    assert good.num_closed == 1


def test_a_clock_that_jumps_makes_no_times_up(tmp_path: Path) -> None:
    """Wall time jumps by a day, forwards and backwards: records and reports go by the monotonic clock."""
    clock = ManualClock()
    monitor = make(tmp_path, [], clock=clock)
    for window, jump in enumerate([0.0, 86_400.0, -86_400.0, 0.0]):
        clock.wall_offset_seconds += jump
        monitor.begin(Window(window))
        clock.advance(0.5)
        monitor.at(f"window:{window}.last_backward")
        clock.advance(0.25)
        monitor.decided(decided(window))
    monitor.close()
    found = read_records(tmp_path / "rank-00000.windows.jsonl").records
    assert [(r.compute_seconds, r.wait_seconds, r.window_seconds) for r in found] == [(0.5, 0.25, 0.75)] * 4


def test_metrics_that_are_not_numbers_alarm_nobody_and_stay_out_of_the_baseline(tmp_path: Path) -> None:
    told: list[str] = []
    monitor = make(tmp_path, told)
    for window, loss, norm in bloom(before=200):
        wild = window % 5 == 0
        monitor.begin(Window(window))
        monitor.decided(decided(window, loss=math.nan if wild else loss, grad_norm=math.inf if wild else norm))
        if len(told) > 0:
            break
    monitor.close()
    assert "window 31215" in told[0] or "window 31216" in told[0]  # the spike itself is still seen


def test_links_that_get_slow_are_told_once_and_only_where_nobody_is_late() -> None:
    links = LinkWatch()
    for _ in range(3):
        assert links.judge([0.020, 0.0201, 0.0202]) == (None, None)
    assert links.judge([0.025, 0.025, 0.0251]) == (None, None)  # 1.25 times
    assert links.judge([0.030, 0.060, 0.030]) == (None, None)  # somebody is late
    sentence, event = links.judge([0.030, 0.0301, 0.0302])
    assert sentence is not None and "30.0 ms in a window, 20.0 ms before" in sentence
    assert event is not None and event["baseline"] == 0.020
    again, event = links.judge([0.030, 0.0301, 0.0302])
    assert again is None and event is not None


class Pair(Solo):
    size = 2


def overdue(phase: str) -> Overdue:
    return Overdue(phase=phase, where="window 7", seconds=99.0, deadline=60.0, longest=1.0)


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ("data", "waits in window 7 for rank 1 (data)"),
        (None, "waits in window 7 for rank 1 (silent)"),  # vanished in the middle of its report
        ("backward and step", "waits in window 7 for nobody: all ranks wait"),
    ],
)
def test_a_rank_that_waits_says_for_whom(tmp_path: Path, peer: str | None, said: str) -> None:
    told: list[str] = []
    monitor = make(tmp_path, told, group=Pair())
    monitor._overdue(overdue("backward and step"))
    other = tmp_path / "rank-00001.findings.jsonl"
    if peer is None:
        other.write_text('{"event": "overdue", "pha')
    else:
        journal = Journal(other)
        journal.write("overdue", phase=peer)
        journal.close()
    monitor._name_missing(overdue("backward and step"))
    monitor._name_missing(overdue("data"))  # it does not wait itself: nobody is missing
    monitor.close()
    assert told[-1].endswith(said)
    assert len(told) == 2


class Replica(nn.Module):
    """Stands for DDP: it hands its buffers on before the model inside runs, and a peer is late."""

    broadcast_buffers = True

    def __init__(self, module: nn.Module, late: Callable[[], None]) -> None:
        super().__init__()
        self.module = module
        self._late = late

    def forward(self, x: torch.Tensor) -> Any:
        self._late()
        return self.module(x)


@pytest.mark.parametrize(("has_buffers", "compute"), [(True, 2.0), (False, 7.0)])
def test_handing_buffers_on_to_a_late_rank_is_no_work_of_ones_own(has_buffers: bool, compute: float) -> None:
    clock = ManualClock()
    inside = nn.BatchNorm1d(3) if has_buffers else nn.Linear(3, 3)
    model = Replica(inside, lambda: clock.advance(5.0))
    meter = Meter(clock=clock)
    buffers = BufferSync(meter, clock)
    buffers.watch(model)
    for watched in (model, copy.deepcopy(model)):
        meter.begin()
        clock.advance(2.0)
        watched(torch.ones(2, 3))
        meter.at("window:0.last_backward")
        assert meter.end().compute == compute
    buffers.close()
    meter.begin()
    model(torch.ones(2, 3))
    meter.at("window:0.last_backward")
    assert meter.end().compute == 5.0


def looked_at(together_seconds: float, folder: Path) -> tuple[list[str], list[Any], list[Any]]:
    """(what was told, what the journal says, the detector's states) of BLOOM's windows, 0.1 s each."""
    told: list[str] = []
    clock, losses = ManualClock(), Losses(spikes=SpikeDetector())
    monitor = make(folder, told, spikes=losses.spikes, clock=clock, together_seconds=together_seconds)
    losses.settle = monitor.settle
    states = []
    for number, (window, loss, norm) in enumerate(bloom()):
        clock.advance(0.1)
        monitor.begin(Window(window))
        monitor.decided(decided(window, loss=loss, grad_norm=norm))
        if number % 7 == 0:
            states.append(losses.read()["spikes"])
    monitor.close()
    events = [{**event, "time": 0} for event in read_events(folder / "journal.jsonl")]
    return told, events, [*states, losses.read()["spikes"]]


def test_short_windows_looked_at_together_show_what_each_would_have_shown(tmp_path: Path) -> None:
    """Also to whoever reads the state at any edge: a resumed run alarms as its twin."""
    together = looked_at(0.5, tmp_path / "together")
    assert together == looked_at(0.0, tmp_path / "at-once")
    assert together[0], "something was told"


def test_a_window_waits_half_a_second_at_most_and_for_nobody_who_asks(tmp_path: Path) -> None:
    clock = ManualClock()
    monitor = make(tmp_path, [], clock=clock, together_seconds=0.5)

    def seen() -> list[int]:
        return [record.window for record in monitor._flight.records]

    for window in range(4):
        clock.advance(0.2)
        monitor.decided(decided(window))
        assert seen() == ([0, 1, 2] if window >= 2 else [])
    monitor.decided(decided(4, loss=math.nan, is_loss_bad=True))
    assert seen() == [*range(5)]
    monitor.decided(decided(5))
    monitor.dump("a test")
    assert seen() == [*range(6)]
    clock.advance(7.0)
    monitor.decided(decided(6))
    assert seen() == [*range(7)], "a long window at once"
    monitor.decided(decided(7))
    monitor.close()
    assert seen() == [*range(8)]
