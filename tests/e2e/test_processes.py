"""Real processes and real signals: Ctrl-C, a dead launcher, the whole demo."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rank_pool import RankPool
from samerun.core.events import read_events
from samerun.drill.traces import causes, first_differences, read_traces
from samerun.errors import ExitCode
from samerun.run.faults import Deed, Fault, FaultPlan

HERE = Path(__file__).parent


def script(path: Path, body: str) -> Path:
    path.write_text(body)
    return path


def environ(plan: FaultPlan | None = None) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    env.pop("SAMERUN_FAULTS", None)
    return env | ({"SAMERUN_FAULTS": plan.to_text()} if plan else {})


ALONE = "import sys, scenarios; scenarios.train(sys.argv[1], until=8)"
ON_RANKS = """
import sys, torch, torch.distributed as dist, scenarios
torch.set_num_threads(1)
dist.init_process_group("gloo")
scenarios.train(sys.argv[1], wrap="ddp", until=int(sys.argv[2]), save_every="1000 updates", longest=200_000)
"""


def test_a_signal_is_a_clean_stop_with_75_and_the_next_start_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    twin, run = tmp_path / "twin-trace", tmp_path / "run-trace"
    train = [sys.executable, str(script(tmp_path / "train.py", ALONE))]
    whole = {"path": str(tmp_path / "twin"), "until": 8}
    ranks.run(1, "scenarios:train", environ={"SAMERUN_FAULTS": FaultPlan(trace=twin).to_text()}, **whole)
    for window, deed, name in ((2, Deed.TERM, "SIGTERM"), (4, Deed.INTERRUPT, "SIGINT")):
        plan = FaultPlan(trace=run, faults=(Fault(at=f"window:{window}.microbatch:1", rank=0, deed=deed),))
        stopped = subprocess.run(
            [*train, tmp_path / "run"], env=environ(plan), timeout=100, check=False, capture_output=True, text=True
        )
        assert stopped.returncode == ExitCode.STOPPED == 75, stopped.stderr
        assert "Traceback" not in stopped.stderr
        assert f"stopped by {name}, saved as u{window + 1:09d}-" in stopped.stderr
    subprocess.run([*train, tmp_path / "run"], env=environ(FaultPlan(trace=run)), check=True, timeout=100)
    assert not any(first_differences(read_traces(twin), read_traces(run)).values())
    assert causes(read_traces(run)) == []


def test_a_rank_whose_launcher_died_stops_by_itself_and_saves_nothing(tmp_path: Path) -> None:
    """SIGKILL of torchrun in mid-window; no one tells the ranks, and they would go on for 100,000 updates."""
    train = script(tmp_path / "train.py", ON_RANKS)
    plan = FaultPlan(faults=(Fault(at="window:5.microbatch:0", rank=0, deed=Deed.KILL_LAUNCHER),))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(train)]
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(
            [*command, str(tmp_path / "run"), "100000"],
            env=environ(plan),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            assert launcher.wait(timeout=100) == -signal.SIGKILL
            events = events_once_left(tmp_path / "run", seconds=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    decisive = [event for event in events if event["event"] in ("saved", "ended")]
    assert [event["event"] for event in decisive].index("ended") == len(decisive) - 1
    assert "launcher of this attempt died" in decisive[-1]["reason"]
    # The kernel needs a moment to bury the launcher; windows last milliseconds here.
    assert decisive[-1]["progress"]["windows"] < 1000


@pytest.mark.timeout(310)
def test_the_demo_is_the_same_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "samerun.cli", "demo", "--json"],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = json.loads(done.stdout)
    assert told["verdict"] == "same", told
    assert done.returncode == ExitCode.DONE
    assert told["schema"] == "samerun.demo.v1"
    assert set(told["components"]) == {
        "weights", "buffers", "moments", "steps", "scheduler", "scaler", "rng", "cursor", "samples", "loss", "ema",
    }  # fmt: skip
    assert told["cause"] == []
    assert [start["kind"] for start in told["starts"]] == ["fresh", "resumed", "resumed", "fallen back", "fallen back"]
    assert re.search(r"digest", " ".join(told["starts"][3]["passed"]))
    assert len(told["interruptions"]) == 5


@pytest.mark.soak
@pytest.mark.parametrize("component", ["moments", "steps", "cursor", "rng", "scheduler"])
def test_the_demo_fails_for_every_component(component: str) -> None:
    demo_with(component)


def demo_with(left_out: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "samerun.cli", "demo", "--json", "--break", left_out],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = json.loads(done.stdout)
    assert done.returncode == ExitCode.NEGATIVE
    assert told["verdict"] == "differs"
    assert told["cause"] == [left_out]
    assert told["components"][left_out]["first"] is not None


CRASHING = """
import sys, scenarios
def unreadable(self, index):
    raise ValueError(f"sample {index} cannot be read")
if len(sys.argv) > 2:
    scenarios.Noisy.__getitem__ = unreadable
scenarios.train(sys.argv[1], until=3)
"""


def test_a_crash_loop_ends_with_the_evidence_and_93(tmp_path: Path) -> None:
    train = script(tmp_path / "train.py", CRASHING)
    command = [sys.executable, "-m", "samerun.cli", "launch", "--nproc", "1", "--max-restarts", "1", str(train)]
    options = {"env": environ(), "capture_output": True, "text": True, "timeout": 110, "check": False}
    looping = subprocess.run([*command, str(tmp_path / "run"), "crash"], **options)
    assert looping.returncode == ExitCode.DO_NOT_RESTART, looping.stderr
    assert "2 starts failed without committed progress beyond update 0" in looping.stderr
    assert re.search(
        r"ValueError: sample \d+ cannot be read on rank 0 in window 0 .positions 0 to 12, epoch 0", looping.stderr
    )
    fixed = subprocess.run([*command, str(tmp_path / "run")], **options)
    assert fixed.returncode == ExitCode.DONE, fixed.stderr


def events_once_left(run: Path, *, seconds: float) -> list[dict[str, Any]]:
    """The journal, once its attempt has left. Ranks of torchrun have sessions of their own: nobody reaps them here."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        events = [event for file in (run / "journal").glob("??????.jsonl") for event in read_events(file)]
        if events and events[-1]["event"] == "left":
            return events
        time.sleep(0.1)
    raise AssertionError(f"the ranks of the dead launcher still run after {seconds} s")
