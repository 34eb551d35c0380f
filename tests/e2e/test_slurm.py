"""The batch script of examples/ on a real Slurm: preempted by a more urgent job, or out of time; queued again; the same
run at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from samerun.core.events import read_events
from samerun.drill.traces import causes, first_differences, read_traces
from samerun.run.faults import FaultPlan
from slurm_cluster import SlurmCluster, why_not

BATCH = Path(__file__).parents[2] / "examples" / "slurm.sbatch"
TRAIN = """
import sys, time, scenarios
slow = scenarios.Average.update
def update(self):
    slow(self)
    time.sleep(float(sys.argv[3]))
scenarios.Average.update = update
scenarios.train(sys.argv[1], until=int(sys.argv[2]), save_every="1000 updates", longest=1000)
"""
URGENT = "#!/bin/bash\nsleep 3\n"

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Job:
    """The training as a batch job, and its twin."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *options: str, updates: int, pause_seconds: float) -> None:
        self.slurm, self.folder, self.updates = slurm, folder, updates
        train = folder / "train.py"
        train.write_text(TRAIN)
        self._arguments = [str(train), str(folder / "run"), str(updates), str(pause_seconds)]
        self.number = slurm.submit(
            BATCH,
            f"--output={folder / 'job.out'}",
            "--partition=spot",
            *options,
            environ=self._environ("run-trace"),
            arguments=self._arguments,
        )

    def _environ(self, trace: str) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "SHUTDOWN_SECONDS": "50",
            "SAMERUN_FAULTS": FaultPlan(trace=self.folder / trace).to_text(),
        }

    def wait_for_window(self, window: int, *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        trace = self.folder / "run-trace"
        while not trace.exists() or max((line.window for line in read_traces(trace)), default=0) < window:
            assert time.monotonic() < deadline, f"window {window} was not reached\n{self.output()}"
            time.sleep(0.1)

    def output(self) -> str:
        out = self.folder / "job.out"
        return out.read_text() if out.exists() else "(no output)"

    def is_the_twin(self) -> bool:
        arguments = [*self._arguments[:1], str(self.folder / "twin"), str(self.updates), "0"]
        environ = {**os.environ, **self._environ("twin-trace")}
        subprocess.run([sys.executable, *arguments], env=environ, check=True, timeout=100, capture_output=True)
        twin, run = read_traces(self.folder / "twin-trace"), read_traces(self.folder / "run-trace")
        assert causes(run) == []
        return not any(first_differences(twin, run).values())

    def ends(self) -> list[str]:
        files = sorted((self.folder / "run" / "journal").glob("0*.jsonl"))
        return [event["reason"] for file in files for event in read_events(file) if event["event"] == "ended"]


@pytest.mark.timeout(300)
def test_preempted_and_queued_again_is_the_same_run(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, "--exclusive", updates=100, pause_seconds=0.3)
    job.wait_for_window(5, seconds=100)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text(URGENT)
    slurm.submit(urgent, "--exclusive", "--partition=urgent", f"--output={tmp_path / 'urgent.out'}", environ={})
    ended = slurm.wait_for(job.number, "COMPLETED", seconds=150)
    assert "restarts=1" in ended, job.output()
    (reason,) = job.ends()
    assert "stopped by SIGTERM, saved as u" in reason
    assert job.is_the_twin()


@pytest.mark.soak
def test_out_of_time_and_queued_again_is_the_same_run(slurm: SlurmCluster, tmp_path: Path) -> None:
    """USR1 sixty seconds before a limit of two minutes, and a run that needs more than that."""
    job = Job(slurm, tmp_path, "--time=00:02:00", "--signal=USR1@60", updates=300, pause_seconds=0.3)
    ended = slurm.wait_for(job.number, "COMPLETED", seconds=600)
    assert "restarts=0" not in ended, job.output()
    assert all("saved as u" in reason for reason in job.ends())
    assert job.is_the_twin()
