"""Fault plans: a misspelt one never passes as none, and a fault fires once, where, on whom and when it was planned."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samerun.errors import UsageError
from samerun.run.faults import SCHEMA, Deed, Fault, FaultError, FaultPlan, FaultPoints, fired


def text(**entries: Any) -> str:
    return json.dumps({"schema": SCHEMA, **entries})


def test_without_a_plan_there_are_no_faults() -> None:
    assert FaultPlan.parse(None) == FaultPlan()
    FaultPoints(FaultPlan(), rank=0, window=lambda: 0).at("edge:1")


@pytest.mark.parametrize("deed", list(Deed))
def test_a_plan_survives_its_text(deed: Deed, tmp_path: Path) -> None:
    fault = Fault(at="window:13.microbatch:2", rank=1, deed=deed, from_window=7)
    plan = FaultPlan(trace=tmp_path, leave_out=("moments", "rng"), faults=(fault,))
    assert FaultPlan.parse(plan.to_text()) == plan
    assert FaultPlan.parse(FaultPlan().to_text()) == FaultPlan()


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "kill",
        "[]",
        "{}",
        json.dumps({"schema": "samerun.faults.v2"}),
        text(fault=[]),
        text(faults=[{"at": "edge:1", "rank": 0}]),
        text(faults=[{"at": "edge:1", "rank": 0, "do": "kil"}]),
        text(faults=[{"rank": 0, "do": "kill"}]),
        text(faults=3),
        text(trace=3),
    ],
)
def test_a_misspelt_plan_is_refused(broken: str) -> None:
    with pytest.raises(UsageError, match="SAMERUN_FAULTS does not hold a fault plan"):
        FaultPlan.parse(broken)


def test_a_fault_fires_once_at_its_point_on_its_rank_and_is_remembered(tmp_path: Path) -> None:
    fault = Fault(at="edge:3", rank=1, deed=Deed.RAISE)
    plan = FaultPlan(trace=tmp_path / "trace", faults=(fault,))
    others = FaultPoints(plan, rank=0, window=lambda: 3)
    others.at("edge:3")
    assert fired(tmp_path / "trace") == []
    mine = FaultPoints(plan, rank=1, window=lambda: 3)
    mine.at("edge:2")
    with pytest.raises(FaultError, match="planned: raise at edge:3"):
        mine.at("edge:3")
    mine.at("edge:3")
    assert fired(tmp_path / "trace") == [fault.to_json()]


def test_a_fault_is_armed_only_from_its_window_on() -> None:
    window = 4
    plan = FaultPlan(faults=(Fault(at="save:writing", rank=0, deed=Deed.RAISE, from_window=5),))
    points = FaultPoints(plan, rank=0, window=lambda: window)
    points.at("save:writing")
    window = 5
    with pytest.raises(FaultError):
        points.at("save:writing")


VICTIM = """
import signal, sys
from pathlib import Path
from samerun.run.faults import Deed, Fault, FaultPlan, FaultPoints
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: print("noticed", signal.Signals(number).name, flush=True))
plan = FaultPlan(trace=Path(sys.argv[1]), faults=(Fault(at="edge:1", rank=0, deed=Deed(sys.argv[2])),))
FaultPoints(plan, rank=0, window=lambda: 1).at("edge:1")
print("went on", flush=True)
"""


@pytest.mark.parametrize(
    ("deed", "code", "out"),
    [
        (Deed.KILL, -signal.SIGKILL, ""),
        (Deed.TERM, 0, "noticed SIGTERM\nwent on\n"),
        (Deed.INTERRUPT, 0, "noticed SIGINT\nwent on\n"),
    ],
)
def test_deeds_are_real_signals_and_written_down_before(tmp_path: Path, deed: Deed, code: int, out: str) -> None:
    end = subprocess.run(
        [sys.executable, "-c", VICTIM, str(tmp_path), deed.value],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (end.returncode, end.stdout) == (code, out), end.stderr
    assert [fault["do"] for fault in fired(tmp_path)] == [deed.value]
