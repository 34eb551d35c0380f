from __future__ import annotations

import json
from pathlib import Path

from samerun.core.clock import ManualClock
from samerun.health.records.event import WindowRecord
from samerun.health.records.flight import FlightRecorder
from unit.health.health_records import record


def waits_in_a_named_place(recorder: FlightRecorder, path: Path) -> str | None:
    return recorder.dump(path, reason="hang", facts={"rank": 3})


def test_a_dump_holds_the_last_windows_the_phase_and_the_stacks(tmp_path: Path) -> None:
    recorder = FlightRecorder(capacity=7, clock=ManualClock())
    for number in range(20):
        recorder.add(record(window=number))
    recorder.phase = "window:19.step"
    assert waits_in_a_named_place(recorder, tmp_path / "deep" / "dump.json") is None
    document = json.loads((tmp_path / "deep" / "dump.json").read_text())
    assert [WindowRecord.from_values(v).window for v in document["records"]] == list(range(13, 20))
    assert (document["reason"], document["phase"], document["rank"]) == ("hang", "window:19.step", 3)
    assert document["time"] == 1.7e9
    main = next(frames for name, frames in document["stacks"].items() if name.startswith("MainThread"))
    assert any("waits_in_a_named_place" in frame for frame in main)


def test_a_dump_that_fails_says_why_and_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    why = FlightRecorder().dump(tmp_path / "file" / "dump.json", reason="crash")
    assert why is not None and "dump.json" in why
