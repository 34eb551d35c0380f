"""The README's loop as a user runs it: python, torchrun with DDP and with FSDP2, killed by SIGKILL, started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samerun.drill.traces import causes, first_differences, read_traces
from samerun.run.faults import Deed, Fault, FaultPlan, fired

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


def start(run: Path, plan: FaultPlan, *, num_ranks: int, sharded: bool) -> int:
    launcher = (
        [] if num_ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    )
    options = ["--updates", "12", *(["--fsdp"] if sharded else [])]
    return subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE), str(run), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "SAMERUN_FAULTS": plan.to_text()},
        capture_output=True,
        timeout=150,
        check=False,
    ).returncode


def killed_and_resumed_is_its_twin(folder: Path, num_ranks: int, sharded: bool) -> None:
    setup = {"num_ranks": num_ranks, "sharded": sharded}
    twin, run = folder / "twin-trace", folder / "run-trace"
    assert start(folder / "twin", FaultPlan(trace=twin), **setup) == 0
    kill = Fault(at="window:7.microbatch:0", rank=num_ranks - 1, deed=Deed.KILL)
    assert start(folder / "run", FaultPlan(trace=run, faults=(kill,)), **setup) != 0
    assert fired(run) == [kill.to_json()]
    assert start(folder / "run", FaultPlan(trace=run), **setup) == 0
    found = first_differences(read_traces(twin), read_traces(run))
    assert {name: first for name, first in found.items() if first} == {}
    assert causes(read_traces(run)) == []


@pytest.mark.timeout(480)
@pytest.mark.parametrize(("num_ranks", "sharded"), [(1, False)])
def test_example_killed_and_resumed_is_its_twin(tmp_path: Path, num_ranks: int, sharded: bool) -> None:
    killed_and_resumed_is_its_twin(tmp_path, num_ranks, sharded)


@pytest.mark.soak
@pytest.mark.parametrize(("num_ranks", "sharded"), [(2, False), (2, True), (4, False), (4, True)])
def test_example_on_the_other_setups(tmp_path: Path, num_ranks: int, sharded: bool) -> None:
    killed_and_resumed_is_its_twin(tmp_path, num_ranks, sharded)
