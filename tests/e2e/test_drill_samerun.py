"""Drills of a script that uses samerun, through the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samerun.core.component import COMPONENTS

HERE = Path(__file__).parent


def drill(*options: str, until: int = 10, num_ranks: int = 1, last: str = "") -> tuple[int, dict[str, Any]]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{nproc}"] if num_ranks > 1 else []
    command = [sys.executable, *launcher, str(HERE / "tiny_train.py"), "{out}", str(until), *last.split()]
    done = subprocess.run(
        [sys.executable, "-m", "samerun.cli", "drill", *options, "--json", "--", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(400)
def test_a_component_left_out_is_named_and_the_exit_is_3() -> None:
    code, told = drill("continuity", "--at", "window:5", "--break", "cursor")
    assert (code, told["verdict"], told["cause"]) == (3, "wrong", ["cursor"]), told
    assert told["components"]["cursor"]["first"] is not None
    assert [start["kind"] for start in told["starts"]] == ["fresh", "resumed", "resumed"]


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in COMPONENTS if name != "cursor"])
def test_every_component_left_out_is_named(name: str) -> None:
    code, told = drill("continuity", "--at", "window:5", "--break", name)
    assert (code, told["cause"]) == (3, [name]), told
    assert told["verdict"] == ("drift" if name == "rng" else "wrong")


@pytest.mark.soak
@pytest.mark.parametrize("scenario", ["continuity", "crash", "preempt", "damage", "faults"])
def test_every_scenario_is_the_same_run(scenario: str) -> None:
    code, told = drill(scenario, until=14)
    assert (code, told["verdict"]) == (0, "same"), told


@pytest.mark.soak
@pytest.mark.parametrize("scenario", ["continuity", "preempt", "faults"])
def test_every_scenario_on_two_ranks(scenario: str) -> None:
    code, told = drill(scenario, "--nproc", "2", until=14, num_ranks=2)
    assert (code, told["verdict"]) == (0, "same"), told


@pytest.mark.soak
def test_five_kills_on_two_ranks() -> None:
    code, told = drill("continuity", "--kills", "5", "--nproc", "2", until=20, num_ranks=2)
    assert (code, told["verdict"]) == (0, "same"), told
    assert len(told["interruptions"]) == 5


@pytest.mark.soak
def test_samples_stay_the_same_on_fewer_ranks_and_dropout_makes_it_drift() -> None:
    code, told = drill("topology", "--nproc", "3,2,1", until=9, num_ranks=3, last="alike")
    assert (code, told["verdict"]) == (3, "drift"), told
    assert all(told["components"][name]["verdict"] == "same" for name in ("cursor", "samples", "steps", "scheduler"))
    assert told["cause"] == []
